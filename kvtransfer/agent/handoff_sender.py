"""The agent's sending side: executes the decisions of send sessions over the links to the decode workers' ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.connection.handshake import LocalRank
from kvtransfer.control import (
    BeginStep,
    CloseSend,
    FromAgent,
    LayerDone,
    LinkReport,
    LinkState,
    OpenSend,
    Peer,
    SendClosed,
    SendFailed,
)
from kvtransfer.link.out_link import OutLink
from kvtransfer.session.exports import Exports, Ready
from kvtransfer.session.piece import FrameType, Header, parse_failure
from kvtransfer.session.reshard import PlannedLink, reshard_plan
from kvtransfer.session.send import Abort, Finish, Open, PushPiece, Renew, ReportSend, SendAction, SendSession
from kvtransfer.session.ticket import Ticket
from kvtransfer.transports.factory import Transports
from tandem.clock import Clock
from tandem.errors import IncompatiblePools, InputError
from tandem.rpc.identity import WorkerEpoch

log = logging.getLogger(__name__)

OPENING_AT_ONCE = 64  # links that no ticket waits for
_REMEMBERED = 4096
PeerKey = tuple[str, int, int]


@dataclass(slots=True)
class _PendingSend:
    """An OpenSend whose decode worker is not in the directory yet."""

    message: OpenSend
    ticket: Ticket
    expires_s: float


@dataclass(slots=True)
class _Sending:
    message: OpenSend
    session: SendSession

    def peer(self, decode_rank: int) -> PeerKey:
        return (self.message.decode_worker, self.message.decode_epoch, decode_rank)


class HandoffSender:
    def __init__(
        self, local: LocalRank, transports: Transports, clock: Clock, report: Callable[[FromAgent], None]
    ) -> None:
        self._local = local
        self._transports = transports
        self._clock = clock
        self._report = report
        self._exports = Exports(local.layout.layers, clock, local.attach.ticket_ttl_s)
        self._peers: dict[WorkerEpoch, dict[int, Peer]] = {}
        self._gone: dict[WorkerEpoch, None] = {}  # the latest, in order
        self._links: dict[PeerKey, OutLink] = {}
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)
        self._tasks: dict[PeerKey, asyncio.Task[None]] = {}
        self._waiting: dict[str, _PendingSend] = {}
        self._sending: dict[str, _Sending] = {}
        self._export_tickets: dict[str, str] = {}

    # --- the directory -----------------------------------------------------------------------------------------

    def change_peers(self, changed: Mapping[WorkerEpoch, dict[int, Peer]], gone: Collection[WorkerEpoch]) -> None:
        """`changed`: worker epochs with all their ranks' agents."""
        for worker_epoch in gone:
            if self._peers.pop(worker_epoch, None) is not None:
                self._gone[worker_epoch] = None
                self._drop_links(worker_epoch, {})
        for worker_epoch, ranks in changed.items():
            self._gone.pop(worker_epoch, None)
            self._peers[worker_epoch] = ranks
            self._drop_links(worker_epoch, ranks)
            if all(peer.connect for peer in ranks.values()):
                self._make_links(worker_epoch)
        while len(self._gone) > _REMEMBERED:
            self._gone.pop(next(iter(self._gone)))
        for waiting in list(self._waiting.values()):
            self._try_start(waiting)

    def _drop_links(self, worker_epoch: WorkerEpoch, ranks: Mapping[int, Peer]) -> None:
        """Ends links to agents that are gone or restarted at another address, and those that nothing needs."""
        for key in [key for key in self._links if key[:2] == worker_epoch]:
            link, found = self._links[key], ranks.get(key[2])
            if found is None or not found.is_at(link.peer):
                self._drop_link(key)
                self.link_down(link, HandoffCause.PEER_LOST, "the peer left the directory", final=found is None)
            elif not found.connect and not self._over(link):
                self._drop_link(key)

    def _drop_link(self, key: PeerKey) -> None:
        """Forgets a link that is no longer wanted, and reports it as closed rather than down."""
        self._tasks.pop(key).cancel()
        self._links.pop(key).is_wanted = False
        self._report(LinkReport(*key, transport="", state=LinkState.CLOSED, reason="", bytes=0))

    def has_link(self, key: PeerKey) -> bool:
        return key in self._links

    def report_links(self) -> None:
        for link in self._links.values():
            link.report()

    def _plan(self, worker_epoch: WorkerEpoch) -> tuple[PlannedLink, ...]:
        """This rank's links to a worker, by the reshard plan. Raises IncompatiblePools."""
        attach = self._local.attach
        tp = next(iter(self._peers[worker_epoch].values())).tp
        plan = reshard_plan(attach.tp, tp, attach.model_kv_heads)
        return tuple(link for link in plan if link.prefill_rank == attach.rank)

    def _make_links(self, worker_epoch: WorkerEpoch) -> None:
        try:
            plan = self._plan(worker_epoch)
        except IncompatiblePools as error:
            log.warning("no links to %s: %s", worker_epoch[0], error)
            return
        for link in plan:
            peer = self._peers[worker_epoch].get(link.decode_rank)
            key = (*worker_epoch, link.decode_rank)
            if peer is None or key in self._links:
                continue
            out = OutLink(self._local, peer, link, self._transports, self, self._report, self._opening)
            self._links[key] = out
            self._tasks[key] = asyncio.create_task(out.run())

    # --- the leader --------------------------------------------------------------------------------------------

    def open_send(self, message: OpenSend) -> None:
        try:
            ticket = self._check(message)
        except (HandoffFault, InputError) as error:
            cause = error.cause if isinstance(error, HandoffFault) else HandoffCause.REFUSED_TICKET
            self._report(SendFailed(message.ticket_id, cause.value, error.message))
            return
        waiting = _PendingSend(message, ticket, self._clock.now_s() + ticket.ttl_s)
        self._waiting[message.ticket_id] = waiting
        self._try_start(waiting)

    def close_send(self, message: CloseSend) -> None:
        waiting = self._waiting.pop(message.ticket_id, None)
        if waiting is not None:
            self._exports.close(waiting.message.export_id)
        entry = self._sending.get(message.ticket_id)
        if entry is None:
            self._report(SendClosed(message.ticket_id))
        else:
            self._do(entry, entry.session.close())

    def begin_step(self, message: BeginStep) -> None:
        now_s = self._clock.now_s()
        for item in message.ranges:
            if entry := self._sending.get(self._export_tickets.get(item.export_id, "")):
                entry.session.stages.computing(now_s)
        self._export(self._exports.begin_step(message.ranges))

    def layer_done(self, message: LayerDone) -> None:
        self._export(self._exports.layer_done(message.layer))

    def still_computing(self) -> None:
        for entry in list(self._sending.values()):
            self._do(entry, entry.session.still_computing())

    def fail_all(self, cause: HandoffCause, reason: str) -> None:
        """Fails all sessions: the leader is gone, or the agent is stopping."""
        for ticket_id in list(self._waiting):
            self._exports.close(self._waiting.pop(ticket_id).message.export_id)
        for entry in list(self._sending.values()):
            self._do(entry, entry.session.fail(cause, reason))

    def tick(self) -> None:
        self._exports.tick()
        now_s = self._clock.now_s()
        for waiting in [each for each in self._waiting.values() if each.expires_s <= now_s]:
            self._give_up(
                waiting,
                HandoffCause.DEADLINE,
                f"{waiting.message.decode_worker} did not appear in the directory in time",
            )
        for entry in list(self._sending.values()):
            self._do(entry, entry.session.tick())

    def unused_links(self) -> list[OutLink]:
        """Ready links that no ticket uses and whose peers know of rest: others would take their ends for losses."""
        in_use = {entry.peer(rank) for entry in self._sending.values() for rank in entry.session.decode_ranks}
        ready = (link for key, link in self._links.items() if link.is_ready and key not in in_use)
        return [link for link in ready if link.peer.transports]

    def _check(self, message: OpenSend) -> Ticket:
        ticket = Ticket.parse(message.signed_ticket)
        attach = self._local.attach
        if message.ticket_id in self._waiting or message.ticket_id in self._sending:
            raise HandoffFault(HandoffCause.PROTOCOL, "this ticket is already open")
        if (ticket.prefill_worker, ticket.prefill_epoch) != (attach.worker_id, attach.epoch):
            raise HandoffFault(HandoffCause.STALE_EPOCH, "the ticket is for another epoch of the prefill worker")
        named = (message.ticket_id, message.decode_worker, message.decode_epoch, message.prompt_tokens)
        if named != (ticket.ticket_id, ticket.decode_worker, ticket.decode_epoch, ticket.prompt_tokens):
            raise HandoffFault(HandoffCause.REFUSED_TICKET, "the ticket and the request differ")
        return ticket

    def _try_start(self, waiting: _PendingSend) -> None:
        worker_epoch = (waiting.message.decode_worker, waiting.message.decode_epoch)
        if worker_epoch not in self._peers:
            if worker_epoch in self._gone:
                self._give_up(waiting, HandoffCause.STALE_EPOCH, f"that epoch of {worker_epoch[0]} has ended")
            return
        self._make_links(worker_epoch)
        try:
            links = self._plan(worker_epoch)
        except IncompatiblePools as error:
            self._give_up(waiting, HandoffCause.TRANSPORT, error.message)
            return
        if any((*worker_epoch, link.decode_rank) not in self._links for link in links):
            return  # a rank of the worker is missing from the directory
        del self._waiting[waiting.message.ticket_id]
        session = SendSession(waiting.ticket, links, self._local.layout, self._clock)
        entry = _Sending(waiting.message, session)
        self._sending[waiting.ticket.ticket_id] = entry
        self._export_tickets[waiting.message.export_id] = waiting.ticket.ticket_id
        self._do(entry, session.start())
        for decode_rank in session.decode_ranks:
            link = self._links[entry.peer(decode_rank)]
            link.need(self._clock.now_s())
            if link.is_ready:
                self._do(entry, session.link_ready(decode_rank, link.max_piece_bytes))
            elif link.is_refused:
                self._do(entry, session.link_down(decode_rank, HandoffCause.TRANSPORT, link.reason, final=True))
        for ready in self._exports.open(waiting.message.export_id):
            self._do(entry, session.ready(ready))

    def _give_up(self, waiting: _PendingSend, cause: HandoffCause, reason: str) -> None:
        self._waiting.pop(waiting.message.ticket_id, None)
        self._exports.close(waiting.message.export_id)
        self._report(SendFailed(waiting.message.ticket_id, cause.value, reason))

    def _export(self, found: list[tuple[str, Ready]]) -> None:
        for export_id, ready in found:
            entry = self._sending.get(self._export_tickets.get(export_id, ""))
            if entry is not None:
                self._do(entry, entry.session.ready(ready))

    # --- links -------------------------------------------------------------------------------------------------

    def link_ready(self, link: OutLink) -> None:
        for entry, rank in self._over(link):
            self._do(entry, entry.session.link_ready(rank, link.max_piece_bytes))

    def link_down(self, link: OutLink, cause: HandoffCause, reason: str, *, final: bool) -> None:
        for entry, rank in self._over(link):
            self._do(entry, entry.session.link_down(rank, cause, reason, final=final))

    def link_frame(self, link: OutLink, header: Header, body: bytes) -> None:
        if header.type is FrameType.IDLE:
            if link in self.unused_links():  # else the peer asks again later
                link.rest()
            return
        entry = self._sending.get(header.ticket_id)
        rank = link.peer.rank
        if entry is None or entry.peer(rank) != (link.peer.worker_id, link.peer.epoch, rank):
            return  # the session is over; the receiver learns of it separately
        if rank not in entry.session.decode_ranks:
            return
        match header.type:
            case FrameType.ACCEPT:
                self._do(entry, entry.session.accepted(rank))
            case FrameType.ACK:
                self._do(entry, entry.session.acknowledged(rank, header.seq))
            case FrameType.FAIL:
                fault = parse_failure(body)
                self._do(entry, entry.session.fail(fault.cause, fault.message))
            case FrameType.ABORTED:
                self._do(entry, entry.session.aborted(rank))
            case _:
                self._do(entry, entry.session.fail(HandoffCause.PROTOCOL, f"the receiver sent {header.type.name}"))

    def _over(self, link: OutLink) -> list[tuple[_Sending, int]]:
        peer, rank = link.peer, link.peer.rank
        return [
            (entry, rank)
            for entry in self._sending.values()
            if rank in entry.session.decode_ranks and entry.peer(rank) == (peer.worker_id, peer.epoch, rank)
        ]

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def sending_count(self) -> int:
        return len(self._sending)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def ready_links(self) -> int:
        return sum(link.is_ready for link in self._links.values())

    # --- actions -----------------------------------------------------------------------------------------------

    def _do(self, entry: _Sending, actions: list[SendAction]) -> None:
        ticket_id = entry.session.ticket.ticket_id
        for action in actions:
            match action:
                case ReportSend(message):
                    self._report(message)
                case Open(rank):
                    self._send(entry, rank, Header(FrameType.OPEN, ticket_id), entry.message.signed_ticket)
                case Finish(rank, pieces):
                    self._send(entry, rank, Header(FrameType.FINISH, ticket_id, seq=pieces))
                case Abort(rank):
                    self._send(entry, rank, Header(FrameType.ABORT, ticket_id))
                case Renew(rank):
                    self._send(entry, rank, Header(FrameType.HEARTBEAT, ticket_id))
                case PushPiece(rank, piece, span):
                    link = self._links.get(entry.peer(rank))
                    if link is not None:
                        link.push(partial(_is_sending, entry.session), ticket_id, piece, span)
        if entry.session.is_over and self._sending.pop(ticket_id, None) is not None:
            self._export_tickets.pop(entry.message.export_id, None)
            self._exports.close(entry.message.export_id)
            for rank in entry.session.decode_ranks:
                if link := self._links.get(entry.peer(rank)):
                    link.used_s = self._clock.now_s()
                    link.report()

    def _send(self, entry: _Sending, rank: int, header: Header, body: bytes = b"") -> None:
        link = self._links.get(entry.peer(rank))
        if link is not None:
            link.send(header, body)


def _is_sending(session: SendSession) -> bool:
    return session.is_sending
