"""The optional transport: whole handoffs where its library is installed, a refusal that says what to do where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.control import LinkReport, Received, Sent
from kvtransfer.pool.pool import PoolMap, PoolSpan
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from kvtransfer.transports.choice import check_available
from kvtransfer.transports.host_support import why_no_nixl
from kvtransfer.transports.nixl import runs_of
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout

MakeWorker = Callable[..., FakeWorker]
LAYOUT = KvPoolLayout(7, 3, 4, 4, 8, "float32")


@pytest.mark.parametrize("joined", [False, True])
@settings(max_examples=100)
@given(data=st.data())
def test_runs_are_the_span_in_canonical_order(joined: bool, data: st.DataObject) -> None:
    layout = replace(LAYOUT, joined=joined)
    ids = data.draw(st.lists(st.integers(0, LAYOUT.num_blocks - 1), min_size=1, unique=True))
    layer, head = data.draw(st.integers(0, LAYOUT.layers - 1)), data.draw(st.integers(0, LAYOUT.kv_heads - 1))
    span = PoolSpan(
        tuple(ids),
        data.draw(st.integers(1, LAYOUT.block_tokens)),
        layer,
        data.draw(st.integers(1, LAYOUT.layers - layer)),
        head,
        data.draw(st.integers(1, LAYOUT.kv_heads - head)),
    )
    memory = bytearray(np.random.default_rng(0).integers(0, 256, layout.pool_bytes, np.uint8).tobytes())
    pool = PoolMap(layout, memory)
    size = sum(part.size for part in pool.slices(span))
    assert b"".join(memory[at : at + count] for at, count in runs_of(layout, span).tolist()) == (
        pool.pack(span, size).tobytes()
    )


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
async def test_blocks_arrive_where_the_library_is_and_a_refusal_names_it_where_not(
    make_worker: MakeWorker, prefill_tp: int, decode_tp: int
) -> None:
    model = FakeModel()
    prefill = make_worker("prefill-0", model, tp=prefill_tp, connects=True, transport="nixl", ttl_s=60.0)
    decode = make_worker("decode-0", model, tp=decode_tp, transport="nixl", ttl_s=60.0)
    await prefill.attach()
    await decode.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    if why_no_nixl():
        refused = await prefill.ranks[0].expect(LinkReport, state="refused")
        assert "pip install 'tandem-serve[nixl]'" in refused.reason
        with pytest.raises(ConfigError, match=r"^transfer\.transport: nixl: nixl is not installed: pip install"):
            check_available("nixl", on_gpu=False)
        return
    await prefill.linked(timeout_s=60.0)
    for seed in range(2):
        handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)
        handoff.open_receive()
        handoff.open_send()
        handoff.export_cached(0, 2)
        handoff.compute(2, handoff.kv.blocks)
        for rank in decode.ranks:
            await rank.expect(Received, ticket_id=handoff.ticket_id)
        for rank in prefill.ranks:
            await rank.expect(Sent, ticket_id=handoff.ticket_id)
        assert handoff.arrived()
