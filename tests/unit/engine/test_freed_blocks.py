"""What a request left in a block is read by no other: not by its attention, nor its export, nor what receives that."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtransfer.pool.pool import Bytes, PoolMap, PoolSpan, payload_bytes
from tandem.engine import factory
from tandem.engine.api import Reservation
from tandem.engine.factory import Rank
from tandem.kvcache.block_pool import BlockHold, BlockPool, Found
from tandem.kvcache.host_tier import HostTier
from tandem.request import SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.testing.engine import EngineDriver, make_request
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 300
REUSES = 10_000 if os.environ.get("TANDEM_SOAK") else 500  # of blocks, in each pool
BLOCKS, LAYERS = 16, 2
LENGTHS = (5, 16, 17, 33, 47, 64, 90)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Marked(BlockPool):
    """Puts the canary into each block that is given out anew: a NaN, which spreads to all that is computed from it."""

    memory: Tensor | None = None
    given = 0

    def acquire(self, found: Sequence[Found], fresh: int, hold: BlockHold, *, spare: int = 0) -> list[int]:
        blocks = super().acquire(found, fresh, hold, spare=spare)
        if self.memory is not None:
            self.memory[blocks[len(found) :]] = torch.nan
            self.given += len(blocks) - len(found)
        return blocks


class Sent:
    """The bytes of each export, as an agent sends them."""

    def __init__(self) -> None:
        self.source: Rank | None = None
        self.pieces: dict[str, list[tuple[ExportRange, Bytes]]] = {}
        self._ranges: Sequence[ExportRange] = ()

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self._ranges = ranges
        self._send(in_cache=True)

    def layer_done(self, layer: int) -> None:
        if layer == LAYERS - 1:
            self._send(in_cache=False)

    def _send(self, *, in_cache: bool) -> None:
        assert self.source is not None
        for each in self._ranges:
            if each.in_cache is in_cache:
                span, size = span_of(self.source, each.block_ids, each.last_block_tokens)
                self.pieces.setdefault(each.request_id, []).append((each, mapped(self.source).pack(span, size)))


def mapped(rank: Rank) -> PoolMap:
    assert rank.pool.fd is not None
    return PoolMap.map_fd(rank.pool.layout, rank.pool.fd, writable=True)


def span_of(rank: Rank, block_ids: Sequence[int], tokens: int) -> tuple[PoolSpan, int]:
    layout = rank.pool.layout
    size = payload_bytes(layout, len(block_ids), tokens, layout.layers, layout.kv_heads)
    return PoolSpan(tuple(block_ids), tokens, 0, layout.layers, 0, layout.kv_heads), size


def place(rank: Rank, reservation: Reservation, piece: ExportRange, data: Bytes) -> None:
    blocks = reservation.block_ids[piece.first_block : piece.first_block + len(piece.block_ids)]
    mapped(rank).unpack(data, span_of(rank, blocks, piece.last_block_tokens)[0])


@pytest.mark.soak
@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.slow), "auto"])
@pytest.mark.acceptance(43, here="500 times in each of two pools, with handoffs between them", soak="10,000 times")
def test_no_old_byte_reaches_an_answer_or_an_export(
    make: Callable[..., Rank], reference: Reference, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    pools: list[Marked] = []

    def marked(num_blocks: int, tier: HostTier | None) -> Marked:
        pools.append(Marked(num_blocks, tier))
        return pools[-1]

    monkeypatch.setattr(factory, "BlockPool", marked)
    sent = Sent()
    source, target = (make(kv_blocks=BLOCKS, kernels=kernels, exporter=each) for each in (sent, None))
    for pool, rank in zip(pools, (source, target), strict=True):
        pool.memory = rank.pool.tensor
    sent.source = source
    s, t = EngineDriver(source.engine), EngineDriver(target.engine)
    prompts = [random_prompt(length, VOCAB, seed) for length in LENGTHS for seed in (1, 2)]
    answers = [reference.answer(prompt, GREEDY) for prompt in prompts]
    choose, turn = random.Random(1), 0

    while min(pool.given for pool in pools) < REUSES:
        turn += 1
        moved, here, there = (choose.randrange(len(prompts)) for _ in range(3))
        cached = turn % 2 == 0
        request = make_request(f"moved {turn}", prompts[moved], GREEDY, use_prefix_cache=cached)
        reservation = t.engine.reserve(request)
        first_block = reservation.first_missing_block
        s.add(request.request_id, request.prompt, GREEDY, export_from_block=first_block, use_prefix_cache=cached)
        for driver, number in ((s, here), (t, there)):  # beside it, so that blocks change hands between steps
            driver.add(f"stays {turn}", prompts[number], GREEDY, use_prefix_cache=cached)
            driver.run()
        for piece, data in sent.pieces.pop(request.request_id, []):
            assert np.isfinite(data.view(np.float32)).all()
            place(target, reservation, piece, data)
        s.engine.release_export(request.request_id)
        (first,) = s.tokens[request.request_id]
        t.engine.join(request.request_id, first)
        t.run()
        assert [first, *t.tokens[request.request_id]] == answers[moved]
        assert s.tokens[f"stays {turn}"] == answers[here]
        assert t.tokens[f"stays {turn}"] == answers[there]
    assert s.at_rest()
    assert t.at_rest()
