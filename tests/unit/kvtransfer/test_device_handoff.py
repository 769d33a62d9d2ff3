"""Whole handoffs between pools that are used as those in GPU memory are, on the device that every machine has."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.causes import HandoffCause
from kvtransfer.control import Attached, LinkReport, Received, ReceiveFailed, SendFailed, Sent
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from tandem.testing.models import FaultSettings

MakeWorker = Callable[..., FakeWorker]
DEVICES = ("cpu", "cpu")


async def pair(
    make_worker: MakeWorker,
    devices: tuple[str, str] = DEVICES,
    *,
    tp: tuple[int, int] = (1, 1),
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[FakeWorker, FakeWorker]:
    """`ttl_s` is long because agents load torch."""
    options = {"ttl_s": 60.0} | both
    sender = make_worker("prefill-0", tp=tp[0], device=devices[0], connects=True, **options, **(prefill or {}))
    receiver = make_worker("decode-0", tp=tp[1], device=devices[1], **options, **(decode or {}))
    await sender.attach()
    await receiver.attach()
    sender.set_peers_of(receiver)
    receiver.set_peers_of(sender)
    return sender, receiver


def start(prefill: FakeWorker, decode: FakeWorker, seed: int = 0) -> Handoff:
    handoff = Handoff.make(prefill, decode, tokens=27, seed=seed)  # a partial last block
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, 2)
    handoff.compute(2, handoff.kv.blocks)
    return handoff


async def complete(handoff: Handoff) -> set[str]:
    """Returns the transports that carried the blocks."""
    found: set[str] = set()
    for rank in handoff.prefill.ranks:
        await rank.expect(Sent, ticket_id=handoff.ticket_id)
    for rank in handoff.decode.ranks:
        found |= {*(await rank.expect(Received, ticket_id=handoff.ticket_id)).transports}
    assert handoff.arrived()
    return found


@pytest.mark.parametrize(
    ("tp", "digests"),
    [
        ((2, 1), False),
        pytest.param((1, 2), True, marks=pytest.mark.slow),
        pytest.param((1, 1), False, marks=pytest.mark.soak_only),
    ],
)
async def test_blocks_arrive_by_the_devices_own_copies(
    make_worker: MakeWorker, tp: tuple[int, int], digests: bool
) -> None:
    prefill, decode = await pair(make_worker, tp=tp, digests=digests)
    for seed in range(2):
        await complete(start(prefill, decode, seed))
    report = await prefill.ranks[0].expect(LinkReport, state="ready")
    assert (report.transport, report.reason) == ("mapped", "")


@pytest.mark.slow
async def test_a_large_prompt_in_scattered_blocks_arrives(make_worker: MakeWorker) -> None:
    model = FakeModel(layers=4, block_tokens=16, head_dim=64)
    prefill, decode = await pair(make_worker, model=model, num_blocks=160)
    handoff = Handoff.make(prefill, decode, tokens=2395)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, handoff.kv.blocks)
    await complete(handoff)


def faulty(point: str, *kinds: str) -> dict[str, Any]:
    settings = FaultSettings(every=1, points=(point,), kinds=kinds, limit=1)
    return {"launcher": ("kvtransfer.testing.agent", "--faults", settings.to_json())}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (faulty("memory", "flip"), {}),  # the source changes between digest and copy
        ({}, faulty("place", "flip")),  # what was copied is not what was sent
    ],
)
@pytest.mark.slow
async def test_what_changes_on_its_way_is_found_and_the_next_handoff_is_whole(
    make_worker: MakeWorker, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    sender, receiver = await pair(make_worker, prefill=prefill, decode=decode)
    broken = start(sender, receiver)
    failed = await receiver.ranks[0].expect(ReceiveFailed, ticket_id=broken.ticket_id)
    assert failed.cause == HandoffCause.DIGEST_MISMATCH
    await sender.ranks[0].expect(SendFailed, ticket_id=broken.ticket_id)
    await complete(start(sender, receiver, seed=1))


@pytest.mark.slow
async def test_an_agent_that_names_blocks_outside_its_pool_is_refused(make_worker: MakeWorker) -> None:
    sender, receiver = await pair(make_worker, prefill=faulty("blocks", "misaddress"))
    broken = start(sender, receiver)
    await sender.ranks[0].expect(SendFailed, ticket_id=broken.ticket_id)
    await sender.ranks[0].expect(LinkReport, state="down")  # what is opened on the old connection ends with it
    await complete(start(sender, receiver, seed=1))


@pytest.mark.parametrize(
    ("devices", "transport", "expected"),
    [
        (("cpu", ""), "auto", "tcp"),
        pytest.param(("", "cpu"), "auto", "tcp", marks=pytest.mark.slow),
        pytest.param(("cpu", ""), "process_group", "process_group", marks=pytest.mark.slow),
        pytest.param(("", "cpu"), "process_group", "process_group", marks=pytest.mark.slow),
        pytest.param(("", "cpu"), "tcp", "tcp", marks=pytest.mark.soak_only),
    ],
)
async def test_where_pools_cannot_map_each_other_bytes_go_over_host_memory(
    make_worker: MakeWorker, devices: tuple[str, str], transport: str, expected: str
) -> None:
    prefill, decode = await pair(make_worker, devices, transport=transport)
    for seed in range(2):
        await complete(start(prefill, decode, seed))
    report = await prefill.ranks[0].expect(LinkReport, state="ready")
    assert report.transport == expected
    assert "host memory" in report.reason


@pytest.mark.parametrize("devices", [("cpu", ""), ("", "cpu")])
@pytest.mark.slow
async def test_mapped_is_not_forced_on_pools_in_unlike_memory(
    make_worker: MakeWorker, devices: tuple[str, str]
) -> None:
    prefill, _ = await pair(make_worker, devices, transport="mapped")
    refused = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "host memory" in refused.reason


@pytest.mark.parametrize(
    ("tp", "digests"),
    [
        ((1, 1), True),
        pytest.param((2, 1), True, marks=pytest.mark.slow),
        pytest.param((1, 2), False, marks=pytest.mark.slow),
    ],
)
async def test_blocks_arrive_by_messages_between_devices(
    make_worker: MakeWorker, tp: tuple[int, int], digests: bool
) -> None:
    """The code of `nccl`, over gloo."""
    prefill, decode = await pair(make_worker, tp=tp, digests=digests, transport="nccl")
    for seed in range(3):
        assert await complete(start(prefill, decode, seed)) == {"nccl"}
    report = await prefill.ranks[0].expect(LinkReport, state="ready")
    assert report.transport == "nccl"
    assert report.reason == "mapped is faster here, and transfer.transport is nccl: set it to auto"


@pytest.mark.slow
async def test_a_large_prompt_arrives_by_messages_between_devices(make_worker: MakeWorker) -> None:
    model = FakeModel(layers=4, block_tokens=16, head_dim=64)
    prefill, decode = await pair(make_worker, model=model, num_blocks=160, transport="nccl")
    handoff = Handoff.make(prefill, decode, tokens=2395)
    handoff.open_receive()
    handoff.open_send()
    handoff.export_cached(0, handoff.kv.blocks)
    await complete(handoff)


async def test_a_message_between_devices_that_changes_on_its_way_changes_no_block(make_worker: MakeWorker) -> None:
    sender, receiver = await pair(make_worker, prefill=faulty("digest", "flip"), transport="nccl")
    broken = start(sender, receiver)
    failed = await receiver.ranks[0].expect(ReceiveFailed, ticket_id=broken.ticket_id)
    assert failed.cause == HandoffCause.DIGEST_MISMATCH
    await complete(start(sender, receiver, seed=1))


async def test_messages_between_devices_are_not_for_pools_in_host_memory(make_worker: MakeWorker) -> None:
    prefill, _ = await pair(make_worker, ("cpu", ""), transport="nccl")
    refused = await prefill.ranks[0].expect(LinkReport, state="refused")
    assert "nccl: our pool is in cpu, the peer's in host memory" in refused.reason


SENDER_STAGES = ("hello", "connect", "probe", "send_probe", "open", "push", "piece", "finish")
RECEIVER_STAGES = ("prepare", "join", "probed", "accept", "fetch", "place", "ack")


@pytest.mark.parametrize(
    ("victim", "stage"),
    [
        pytest.param(victim, stage, marks=[] if stage == "place" else pytest.mark.slow)
        for victim, stages in (("prefill", SENDER_STAGES), ("decode", RECEIVER_STAGES))
        for stage in stages
    ],
)
async def test_a_peer_killed_at_any_stage_of_messages_costs_its_handoffs_and_no_more(
    make_worker: MakeWorker, victim: str, stage: str
) -> None:
    fatal = {"launcher": ("kvtransfer.testing.agent", "--killed-at", stage)}
    first, second = (fatal, None) if victim == "prefill" else (None, fatal)
    prefill, decode = await pair(make_worker, prefill=first, decode=second, transport="nccl")
    dead, alive = (prefill, decode) if victim == "prefill" else (decode, prefill)
    broken = start(prefill, decode)
    assert await asyncio.to_thread(dead.ranks[0].process.wait, 30.0) == -signal.SIGKILL
    alive.set_peers_of()  # as its leader says
    kind: type[ReceiveFailed | SendFailed] = ReceiveFailed if victim == "prefill" else SendFailed
    failed = await alive.ranks[0].expect(kind, ticket_id=broken.ticket_id)
    assert failed.cause in (HandoffCause.PEER_LOST, HandoffCause.TRANSPORT)

    dead.ranks[0].start_agent("kvtransfer.agent")
    dead.attached[0] = await dead.ranks[0].expect(Attached)
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    assert await complete(start(prefill, decode, seed=1)) == {"nccl"}
