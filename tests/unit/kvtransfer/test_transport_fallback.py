"""Under `auto`, a link that cannot be opened with one transport is opened with the next, and says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtransfer.control import LinkReport, Received, Sent
from kvtransfer.link.out_link import OPENINGS
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeWorker
from tandem.testing.models import FaultSettings

MakeWorker = Callable[..., FakeWorker]


def failing(point: str, times: int) -> dict[str, object]:
    """An agent whose first openings fail, at the sending end (connect, send_probe) or the receiving one."""
    faults = FaultSettings(every=1, limit=times, points=(point,), kinds=("fail",))
    return {"launcher": ("kvtransfer.testing.agent", "--faults", faults.to_json())}


async def opened(make_worker: MakeWorker, point: str, times: int, **options: object) -> tuple[Handoff, LinkReport]:
    """A handoff that succeeded, and how its link was opened."""
    model, is_sender = FakeModel(), point in ("connect", "send_probe")
    faults = failing(point, times)
    prefill = make_worker("prefill-0", model, connects=True, **options, **(faults if is_sender else {}))
    decode = make_worker("decode-0", model, **options, **({} if is_sender else faults))
    for worker in (prefill, decode):
        await worker.attach()
    decode.set_peers_of(prefill)
    prefill.set_peers_of(decode)
    report = await prefill.ranks[0].expect(LinkReport, state="ready")
    handoff = Handoff.make(prefill, decode, tokens=27)
    handoff.open_receive()
    handoff.open_send()
    handoff.compute(0, handoff.kv.blocks)
    received = await decode.ranks[0].expect(Received, ticket_id=handoff.ticket_id)
    assert received.transports == (report.transport,)
    await prefill.ranks[0].expect(Sent, ticket_id=handoff.ticket_id)
    assert handoff.arrived()
    return handoff, report


@pytest.mark.parametrize("device", ["", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", ["connect", "send_probe", "prepare", "join"])
async def test_the_next_transport_is_taken_when_the_first_fails_to_open(
    make_worker: MakeWorker, point: str, device: str
) -> None:
    handoff, report = await opened(make_worker, point, OPENINGS, device=device)
    assert report.transport == "tcp"
    assert report.reason.startswith(f"mapped: {OPENINGS} openings failed, the last with: ")
    assert report.reason.endswith(": mend that and restart the worker, or set another transfer.transport")
    downs = [each.reason for each in handoff.prefill.ranks[0].messages if isinstance(each, LinkReport) and each.reason]
    assert downs[0] in report.reason, "the status says why"


async def test_one_failed_opening_changes_nothing(make_worker: MakeWorker) -> None:
    _, report = await opened(make_worker, "connect", OPENINGS - 1)
    assert (report.transport, report.reason) == ("mapped", "")


async def test_with_nothing_left_the_first_is_tried_again(make_worker: MakeWorker) -> None:
    _, report = await opened(make_worker, "connect", 2 * OPENINGS)  # mapped, then tcp
    assert (report.transport, report.reason) == ("mapped", "")


async def test_a_named_transport_that_fails_to_open_is_not_replaced(make_worker: MakeWorker) -> None:
    _, report = await opened(make_worker, "connect", OPENINGS + 1, transport="mapped")
    assert (report.transport, report.reason) == ("mapped", "")
