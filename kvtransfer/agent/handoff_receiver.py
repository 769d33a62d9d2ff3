"""The agent's receiving side: executes the decisions of receive sessions. Only this side writes to the rank's pool."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field

import msgspec

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.connection.handshake import LocalRank
from kvtransfer.control import CloseReceive, FromAgent, LinkState, OpenReceive, ReceiveClosed, Received, ReceiveFailed
from kvtransfer.link.in_link import InLink
from kvtransfer.session.piece import FrameType, Piece
from kvtransfer.session.receive import Acknowledge, ReceiveAction, ReceiveSession, ReceivingRank, Refuse, ReportReceive
from kvtransfer.session.ticket import Ticket
from tandem.clock import Clock
from tandem.errors import TandemError
from tandem.rpc.identity import WorkerEpoch

log = logging.getLogger(__name__)

LEASE_GRACE_S = 2.0  # a valid ticket may arrive this long before its OpenReceive
_REMEMBERED = 4096


@dataclass(slots=True)
class _Receiving:
    session: ReceiveSession
    links: dict[int, InLink] = field(default_factory=dict)  # by prefill rank, once accepted


class HandoffReceiver:
    def __init__(
        self,
        local: LocalRank,
        clock: Clock,
        report: Callable[[FromAgent], None],
        sends_to: Callable[[tuple[str, int, int]], bool] = lambda _: False,
    ) -> None:
        """`sends_to` tells whether there is also a link to that (worker, epoch, rank), which is then reported
        instead."""
        attach = local.attach
        self._sends_to = sends_to
        self._local = local
        self._rank = ReceivingRank(attach.rank, attach.tp, attach.model_kv_heads)
        self._clock = clock
        self._report = report
        self._tickets: dict[str, _Receiving] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._links: list[InLink] = []
        self._epochs: set[WorkerEpoch] = set()
        self._opened = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the directory and the leader --------------------------------------------------------------------------

    def change_peers(self, changed: Collection[WorkerEpoch], gone: Collection[WorkerEpoch]) -> None:
        """Ends what comes from epochs that left the directory, or that another epoch has replaced."""
        replaced = {name for name, _ in changed}
        self._epochs = (self._epochs | set(changed)) - set(gone)
        for link in self._links:
            sender = (link.hello.worker_id, link.hello.epoch)
            if sender in gone or (sender not in self._epochs and sender[0] in replaced):
                link.close()
        for entry in list(self._tickets.values()):
            lease = entry.session.lease
            if (lease.prefill_worker, lease.prefill_epoch) in gone:
                self._do(entry, entry.session.fail(HandoffCause.PEER_LOST, "the prefill worker left the directory"))

    def report_links(self) -> None:
        for link in self._links:
            self._report_link(link, LinkState.READY, "")

    def open_receive(self, message: OpenReceive) -> None:
        attach = self._local.attach
        try:
            if message.ticket_id in self._tickets:
                raise HandoffFault(HandoffCause.PROTOCOL, "this ticket is already open")
            session = ReceiveSession(
                message,
                self._rank,
                self._local.layout,
                self._clock,
                ttl_s=attach.ticket_ttl_s,
                digests=attach.digests,
            )
        except HandoffFault as fault:
            self._report(ReceiveFailed(message.ticket_id, fault.cause.value, fault.message))
            return
        entry = _Receiving(session)
        self._tickets[message.ticket_id] = entry
        self._do(entry, session.start())
        self._spawn(self._notify_opened())

    def close_receive(self, message: CloseReceive) -> None:
        entry = self._tickets.get(message.ticket_id)
        if entry is None:
            self._remember(message.ticket_id)
            self._report(ReceiveClosed(message.ticket_id))
        else:
            self._do(entry, entry.session.close())

    def fail_all(self, cause: HandoffCause, reason: str) -> None:
        """Fails all sessions: the leader is gone, or the agent is stopping."""
        for entry in list(self._tickets.values()):
            self._do(entry, entry.session.fail(cause, reason))

    def tick(self) -> None:
        for entry in list(self._tickets.values()):
            self._do(entry, entry.session.tick())

    # --- links -------------------------------------------------------------------------------------------------

    def link_up(self, link: InLink) -> None:
        link.used_s = self._clock.now_s()
        self._links.append(link)
        self._report_link(link, LinkState.READY, "")

    def link_open(self, link: InLink, ticket_id: str, signed: bytes) -> None:
        """Answers once the lease is known. Meanwhile the link serves other tickets."""
        self._spawn(self._admit(link, ticket_id, signed))

    async def _admit(self, link: InLink, ticket_id: str, signed: bytes) -> None:
        try:
            ticket = Ticket.verify(self._local.attach.ticket_key, signed)
            self._check(link, ticket_id, ticket)
            entry = await self._lease(ticket_id)
            entry.session.open_link(ticket, link.hello.rank, link.hello.tp)
        except TandemError as error:
            cause = error.cause if isinstance(error, HandoffFault) else HandoffCause.REFUSED_TICKET
            link.fail(ticket_id, cause, error.message)
            return
        if link not in self._links:
            self._do(entry, entry.session.link_down(link.hello.rank, HandoffCause.PEER_LOST, "the sender disconnected"))
            return
        entry.links[link.hello.rank] = link
        link.used_s = self._clock.now_s()
        link.reply(FrameType.ACCEPT, ticket_id)

    def _check(self, link: InLink, ticket_id: str, ticket: Ticket) -> None:
        attach, hello = self._local.attach, link.hello
        if ticket.ticket_id != ticket_id:
            raise HandoffFault(HandoffCause.REFUSED_TICKET, "the ticket's id differs from the announced one")
        if (ticket.decode_worker, ticket.decode_epoch) != (attach.worker_id, attach.epoch):
            raise HandoffFault(HandoffCause.STALE_EPOCH, "the ticket is for another epoch of the decode worker")
        if (ticket.prefill_worker, ticket.prefill_epoch) != (hello.worker_id, hello.epoch):
            raise HandoffFault(HandoffCause.REFUSED_TICKET, "the ticket is for another sender")

    async def _lease(self, ticket_id: str) -> _Receiving:
        """Waits up to LEASE_GRACE_S, because the ticket may arrive before its OpenReceive."""
        try:
            async with asyncio.timeout(LEASE_GRACE_S), self._opened:
                await self._opened.wait_for(lambda: ticket_id in self._tickets or ticket_id in self._over)
        except TimeoutError:
            pass  # refused below
        if ticket_id not in self._tickets:
            raise HandoffFault(HandoffCause.REFUSED_TICKET, "no lease is open for this ticket")
        return self._tickets[ticket_id]

    async def _notify_opened(self) -> None:
        async with self._opened:
            self._opened.notify_all()

    def link_session(self, link: InLink, ticket_id: str) -> ReceiveSession | None:
        entry = self._entry(link, ticket_id)
        return entry.session if entry else None

    def has_ticket(self, ticket_id: str) -> bool:
        return ticket_id in self._tickets or ticket_id in self._over

    def link_written(self, link: InLink, ticket_id: str, piece: Piece, digest: int, verify_s: float) -> None:
        if entry := self._entry(link, ticket_id):
            self._do(entry, entry.session.end_piece(link.hello.rank, piece, digest, verify_s))

    def link_fault(self, link: InLink, ticket_id: str, fault: HandoffFault, *, writing: bool) -> None:
        if entry := self._entry(link, ticket_id):
            session = entry.session
            drop = session.drop_piece if writing else session.fail
            self._do(entry, drop(fault.cause, fault.message))

    def link_finish(self, link: InLink, ticket_id: str, pieces: int) -> None:
        if entry := self._entry(link, ticket_id):
            self._do(entry, entry.session.finish(link.hello.rank, pieces))

    def link_abort(self, link: InLink, ticket_id: str) -> None:
        if entry := self._entry(link, ticket_id):
            del entry.links[link.hello.rank]
            self._do(entry, entry.session.fail(HandoffCause.CANCELLED, "the prefill worker aborted the handoff"))

    def link_down(self, link: InLink, cause: HandoffCause, reason: str) -> None:
        if link in self._links:
            self._links.remove(link)
        is_used = any(entry.links.get(link.hello.rank) is link for entry in self._tickets.values())
        if link.is_resting and not is_used:  # else it broke its word, and its tickets fail
            self._report_link(link, LinkState.IDLE, "")
            return
        hello = link.hello
        sender = (hello.worker_id, hello.epoch, hello.rank)
        is_last = all((it.hello.worker_id, it.hello.epoch, it.hello.rank) != sender for it in self._links)
        for entry in list(self._tickets.values()):
            lease = entry.session.lease
            is_expected = (lease.prefill_worker, lease.prefill_epoch) == sender[:2] and hello.rank not in entry.links
            if entry.links.get(hello.rank) is link:
                self._do(entry, entry.session.link_down(hello.rank, cause, reason))
            elif is_expected and is_last:  # do not hold blocks for a sender that may never reconnect
                self._do(entry, entry.session.fail(cause, reason))
        self._report_link(link, LinkState.DOWN, reason)

    # --- state -------------------------------------------------------------------------------------------------

    def unused_links(self) -> list[InLink]:
        """Links that no ticket uses, and none is expected to."""
        leases = [entry.session.lease for entry in self._tickets.values()]
        expected = {(lease.prefill_worker, lease.prefill_epoch) for lease in leases}
        return [
            link
            for link in self._links
            if not link.is_resting and (link.hello.worker_id, link.hello.epoch) not in expected
        ]

    @property
    def receiving_count(self) -> int:
        return len(self._tickets)

    @property
    def ready_links(self) -> int:
        return len(self._links)

    # --- actions -----------------------------------------------------------------------------------------------

    def _entry(self, link: InLink, ticket_id: str) -> _Receiving | None:
        entry = self._tickets.get(ticket_id)
        return entry if entry and entry.links.get(link.hello.rank) is link else None

    def _do(self, entry: _Receiving, actions: list[ReceiveAction]) -> None:
        ticket_id = entry.session.lease.ticket_id
        for action in actions:
            match action:
                case ReportReceive(Received() as message):
                    transports = sorted({link.hello.transport for link in entry.links.values()})
                    self._report(msgspec.structs.replace(message, transports=tuple(transports)))
                case ReportReceive(message):
                    self._report(message)
                case Acknowledge(rank, seq):
                    entry.links[rank].reply(FrameType.ACK, ticket_id, seq)
                case Refuse(cause, message):
                    for link in entry.links.values():
                        link.fail(ticket_id, cause, message)
        if entry.session.is_over and self._tickets.pop(ticket_id, None) is not None:
            self._remember(ticket_id)
            for link in entry.links.values():
                link.used_s = self._clock.now_s()
                self._report_link(link, LinkState.READY, "")

    def _remember(self, ticket_id: str) -> None:
        """Remembers a used ticket, so that a late sender is refused without waiting for a lease."""
        self._over[ticket_id] = None
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _report_link(self, link: InLink, state: LinkState, reason: str) -> None:
        hello = link.hello
        if not self._sends_to((hello.worker_id, hello.epoch, hello.rank)):
            self._report(link.report(state, reason))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
