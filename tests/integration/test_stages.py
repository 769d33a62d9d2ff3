"""The stages of real handoffs between live workers: in order, adding up, and with failures counted by cause."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.config.engine import EngineSpec
from tandem.config.transfer import TransportKind
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import worker_pb2
from tests.integration.conftest import StartPair
from worker.testing.session import ManualRouter, WorkerSession, assert_conserved

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
ENGINE = EngineSpec(kv_blocks=160, max_step_tokens=100)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=VOCAB, heads=4, kv_heads=2, seed=1)


async def done(session: WorkerSession, request_id: str) -> worker_pb2.HandoffDone:
    while not isinstance(event := await session.event(request_id), worker_pb2.HandoffDone):
        pass
    return event


async def links_ready(prefill: WorkerSession, number: int) -> None:
    """A link of `process_group` takes seconds to come up; pieces would wait for it."""
    async with asyncio.timeout(60):
        while [link.state for link in (await prefill.state()).links].count("ready") < number:
            await asyncio.sleep(0.05)


def in_order(message: Any, *fields: str) -> None:
    values = [getattr(message, name) for name in fields]
    assert all(message.HasField(name) for name in fields), message
    assert values == sorted(values), dict(zip(fields, values, strict=True))


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "transport"),
    [
        (2, 1, TransportKind.MAPPED),
        pytest.param(1, 1, TransportKind.MAPPED, marks=pytest.mark.soak_only),
        pytest.param(1, 2, TransportKind.PROCESS_GROUP, marks=pytest.mark.soak_only),
    ],
)
async def test_stages_are_in_order_and_add_up(
    pair: StartPair, tiny: Path, prefill_tp: int, decode_tp: int, transport: TransportKind
) -> None:
    hand = ManualRouter()
    async with pair(tiny, prefill_tp=prefill_tp, decode_tp=decode_tp, transport=transport, engine=ENGINE) as live:
        await links_ready(live.prefill, prefill_tp * decode_tp)
        work = hand.work(random_prompt(1500, VOCAB, 1), GREEDY)
        before_s = time.monotonic()
        ticket = await hand.reserve(live.prefill, live.decode, work)
        first = await hand.prefill(live.prefill, work, ticket)
        join = worker_pb2.Join(request_id=work.request_id, first_token=first.token_id)
        live.decode.send(worker_pb2.RouterFrame(join=join))
        sent, received = await done(live.prefill, work.request_id), await done(live.decode, work.request_id)
        took_s = time.monotonic() - before_s

        in_order(received.received, "linked_s", "last_piece_s", "verified_s")  # links are made while others push
        in_order(received.received, "first_piece_s", "last_piece_s")
        assert 0 < received.received.reserved_s <= received.received.first_piece_s
        assert max(received.received.verified_s, received.received.first_token_s) <= received.received.joined_s < took_s
        assert received.reserve_to_join_s == pytest.approx(received.received.joined_s)
        in_order(sent.sent, "opened_s", "computing_s", "first_piece_s", "last_layer_s", "last_ack_s")
        in_order(sent.sent, "opened_s", "linked_s", "last_ack_s")
        in_order(sent.sent, "computing_s", "first_token_s")
        assert sent.sent.first_token_s < took_s

        token_bytes = 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head_dim, fp32
        assert sent.bytes == received.bytes == 1500 * token_bytes
        assert sent.pieces == received.pieces
        assert 0 < sent.sent.hidden_bytes < sent.bytes  # all but the last of fifteen chunks, at the least in part

        # On one host both anchors are of one clock: the sides interlock.
        received_s, sent_s = received.anchor_at_s, sent.anchor_at_s
        assert before_s < received_s < sent_s
        assert sent_s + sent.sent.first_piece_s < received_s + received.received.first_piece_s
        assert received_s + received.received.last_piece_s < sent_s + sent.sent.last_ack_s

        for _ in range(GREEDY.max_tokens):
            if isinstance(await live.decode.event(work.request_id), worker_pb2.Ended):
                break
        (link, *_) = (await live.prefill.state()).links
        assert 0 < link.latency_s < 1
        assert link.bytes_per_s > 0
        (link, *_) = (await live.decode.state()).links
        assert not link.HasField("latency_s")


async def test_a_prompt_that_is_there_has_no_pieces_and_the_loss_of_an_agent_is_counted_by_its_cause(
    pair: StartPair, tiny: Path
) -> None:
    hand = ManualRouter()
    prompt = random_prompt(96, VOCAB, 2)
    async with pair(tiny, engine=ENGINE) as live:
        await hand.generate(live.decode, prompt, GREEDY)
        work = hand.work(prompt, GREEDY)
        ticket = await hand.reserve(live.prefill, live.decode, work)
        assert ticket.cached_tokens == 96
        first = await hand.prefill(live.prefill, work, ticket)
        join = worker_pb2.Join(request_id=work.request_id, first_token=first.token_id)
        live.decode.send(worker_pb2.RouterFrame(join=join))
        received = await done(live.decode, work.request_id)
        assert not received.received.HasField("first_piece_s")
        assert not received.received.HasField("verified_s")
        assert received.received.reserved_s <= received.received.first_token_s <= received.received.joined_s

        work = hand.work(random_prompt(64, VOCAB, 3), GREEDY)
        await hand.reserve(live.prefill, live.decode, work)
        agent = live.workers.live["decode-0"].agents[0]
        agent.kill()
        agent.wait()
        with pytest.raises(Exception, match="transfer agent was lost") as lost:
            await live.decode.event(work.request_id)
        assert getattr(lost.value, "cause", None) == "peer_lost"
        assert dict((await live.decode.state()).handoff_failures) == {"peer_lost": 1}
        live.workers.live["decode-0"].restart_agent(0)
        await asyncio.sleep(0)
        await assert_conserved(live.decode)
