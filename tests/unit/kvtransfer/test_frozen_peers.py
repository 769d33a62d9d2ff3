"""Staging that stopped peers hold, or that is held for long, delays other handoffs but ends none."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvtransfer.agent.agent import Agent
from kvtransfer.causes import HandoffCause
from kvtransfer.control import BeginStep, LinkReport, Received, SendFailed, Sent
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.session.piece import MAX_PIECE_BYTES
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.many_agents import start_host
from kvtransfer.testing.worker import WAIT_S, FakeModel, FakeWorker
from kvtransfer.transports.factory import Transports
from kvtransfer.transports.protocol import STALL_S
from tandem.clock import SystemClock

MakeWorker = Callable[..., FakeWorker]
FROZEN = 8
MODEL = FakeModel(layers=8, kv_heads=8, block_tokens=16, head_dim=64, dtype="bfloat16")
BLOCK_BYTES = 256 << 10
BLOCKS = 1 + MAX_PIECE_BYTES // BLOCK_BYTES  # a small piece, then the largest
TTL_S = 60.0  # agents load torch
ATTEMPTS = 5


def make_handoff(prefill: FakeWorker, decode: FakeWorker, number: int) -> Handoff:
    handoff = Handoff.make(prefill, decode, tokens=BLOCKS * MODEL.block_tokens, seed=number, ttl_s=TTL_S)
    handoff.source_ids = tuple(range(number * BLOCKS, (number + 1) * BLOCKS))
    return handoff


async def begin(handoff: Handoff) -> None:
    """Returns when the first piece has arrived, so that the next is sent at once."""
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 1)
    async with asyncio.timeout(TTL_S):
        while not handoff.decode.ranks[0].holds(handoff.kv, handoff.target_ids[:1]):
            await asyncio.sleep(0.01)


async def finish(handoff: Handoff) -> None:
    await handoff.decode.ranks[0].expect(Received, ticket_id=handoff.ticket_id)
    await handoff.prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()


def links_lost(worker: FakeWorker, peer: FakeWorker) -> list[LinkReport]:
    reports = [each for each in worker.ranks[0].messages if isinstance(each, LinkReport)]
    return [each for each in reports if each.peer_worker == peer.worker_id and each.state == "down"]


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nccl", marks=pytest.mark.slow)])
async def test_eight_stopped_peers_do_not_fail_the_handoff_to_a_ninth(
    make_worker: MakeWorker, tmp_path: Path, transport: str
) -> None:
    device = "cpu" if transport == "nccl" else ""
    prefill = make_worker(
        "prefill-0",
        MODEL,
        num_blocks=(FROZEN + 1) * BLOCKS,
        device="cpu",
        transport=transport,
        connects=True,
        ttl_s=TTL_S,
    )
    names = [f"frozen-{number}" for number in range(FROZEN)]
    host = start_host([prefill.folder.parent / name / "agent-0.sock" for name in names])
    try:
        options = {"num_blocks": BLOCKS, "transport": transport, "device": device, "ttl_s": TTL_S}
        frozen = [make_worker(name, MODEL, host=host, **options) for name in names]
        healthy = make_worker("decode-0", MODEL, **options)
        for worker in (prefill, healthy, *frozen):
            await worker.attach()
            if worker is not prefill:
                worker.set_peers_of(prefill)
        prefill.set_peers_of(healthy, *frozen)
        handoffs = [make_handoff(prefill, each, number) for number, each in enumerate((*frozen, healthy))]
        await asyncio.gather(*map(begin, handoffs))

        for handoff in handoffs:
            prefill.ranks[0].write(handoff.kv, handoff.source_ids[1:], 1)
        host.send_signal(signal.SIGSTOP)
        prefill.ranks[0].send_as_rank(BeginStep(tuple(each.range(1, BLOCKS, in_cache=True) for each in handoffs)))
        *lost, whole = handoffs
        await finish(whole)
        for handoff in lost:
            failed = await prefill.ranks[0].expect(SendFailed, ticket_id=handoff.ticket_id)
            assert failed.cause in (HandoffCause.PEER_LOST, HandoffCause.TRANSPORT)
        assert not links_lost(prefill, healthy)
    finally:
        host.kill()
        host.wait()


@asynccontextmanager
async def running(socket: Path) -> AsyncIterator[Agent]:
    """An agent in this process."""
    agent = Agent(socket, Transports(), SystemClock())
    serving = asyncio.create_task(agent.run())
    yield agent
    agent.stop()
    await serving


@contextmanager
def all_staging(agent: Agent, size_bytes: int, *, receives: bool) -> Iterator[None]:
    """Holds leases until there is no room for another."""
    assert agent._attachment is not None
    local = agent._attachment.local
    assert isinstance(local.pool, DevicePool)
    with ExitStack() as leases:
        for staging in (local.staging, local.pool.staging):
            while staging._find(-(-size_bytes // (1 << 20)), receives=receives) is not None:
                leases.enter_context(staging.lease(size_bytes, receives=receives))
        yield


async def arrives(handoff: Handoff) -> bool:
    """Whether all of it does. Else its sender says that it failed."""
    sender, receiver = handoff.prefill.ranks[0], handoff.decode.ranks[0]
    async with asyncio.timeout(WAIT_S):
        while not (found := {type(each) for each in [*sender.messages, *receiver.messages]} & {Received, SendFailed}):
            await asyncio.sleep(0.01)
    if SendFailed in found:
        return False
    await finish(handoff)
    return True


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nccl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("side", ["sender", pytest.param("receiver", marks=pytest.mark.slow)])
async def test_a_piece_waits_for_staging_longer_than_a_link_may_stall(
    make_worker: MakeWorker, transport: str, side: str
) -> None:
    """A link would end each time. On a machine that stands still for as long, one ends now and then."""
    options = {"num_blocks": BLOCKS, "transport": transport, "device": "cpu", "ttl_s": TTL_S}
    here, there = ("prefill-0", "decode-0") if side == "sender" else ("decode-0", "prefill-0")
    other = make_worker(there, MODEL, connects=side != "sender", **options)
    mine = make_worker(here, MODEL, connects=side == "sender", host=other.ranks[0].process, **options)
    prefill, decode = (mine, other) if side == "sender" else (other, mine)
    async with running(mine.ranks[0].socket_path) as agent:
        await other.attach()
        await mine.attach()
        decode.set_peers_of(prefill)
        prefill.set_peers_of(decode)
        for _ in range(ATTEMPTS):
            handoff = make_handoff(prefill, decode, 0)
            await begin(handoff)
            with all_staging(agent, BLOCK_BYTES, receives=side == "receiver"):
                handoff.export_cached(1, BLOCKS)
                await asyncio.sleep(STALL_S + 1.5)
            if await arrives(handoff) and not links_lost(prefill, decode):
                break
            prefill.ranks[0].messages.clear()
            decode.ranks[0].messages.clear()
        else:
            pytest.fail("the link ended each time")
        mine.stop()
