"""The transfer agent: a process beside each rank that maps the rank's KV pool and exchanges blocks with peers.

    python -m kvtransfer.agent --socket PATH

It ends with its rank's connection. It keeps no state beyond open tickets, so a restarted agent serves the next tickets.
It loads torch only if the pool is in device memory or a link uses `nccl` or `process_group`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvtransfer.agent.handoff_receiver import HandoffReceiver
from kvtransfer.agent.handoff_sender import HandoffSender
from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault, protocol_fault
from kvtransfer.connection.handshake import MAPPED, LocalRank, pool_layout
from kvtransfer.connection.sockets import listen_tcp, listen_unix, peer_is_same_user, receive_first, serve, tcp_address
from kvtransfer.control import (
    Attached,
    AttachPool,
    BeginStep,
    Census,
    ChangePeers,
    CloseReceive,
    CloseSend,
    FromAgent,
    LayerDone,
    Lead,
    OpenReceive,
    OpenSend,
    Peer,
    ReceiveClosed,
    ReceiveFailed,
    SendClosed,
    SendFailed,
    SetPeers,
    StillComputing,
    TakeCensus,
)
from kvtransfer.link.in_link import InLink, LinkAcceptor
from kvtransfer.link.out_link import OutLink
from kvtransfer.pool import digest
from kvtransfer.pool.pool import PoolMap
from kvtransfer.pool.pools import make_host_staging, open_pool
from kvtransfer.session.ticket import KEY_BYTES
from kvtransfer.transports.choice import offered
from kvtransfer.transports.factory import Transports
from tandem.clock import Clock, SystemClock
from tandem.config.log_format import LogFormat
from tandem.errors import ConfigError
from tandem.rpc.channel import Channel, ChannelError
from tandem.rpc.identity import WorkerEpoch
from tandem.rpc.tls import RenewedTls
from tandem.telemetry.logs import setup_logging

if TYPE_CHECKING:
    from kvtransfer.pool.device_pool import DevicePool

log = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_S = 10.0
MAX_TICK_S = 0.5
WARM_LINKS = 16  # kept open without tickets, both ways together; of more than this, those used last
REST_AFTER_S = 5.0
HUNG_EXIT_CODE = 3
_FIRST: msgspec.msgpack.Decoder[AttachPool | Lead] = msgspec.msgpack.Decoder(AttachPool | Lead)
FromRank = BeginStep | LayerDone
ForTickets = OpenReceive | CloseReceive | OpenSend | CloseSend | StillComputing | TakeCensus
FromLeader = SetPeers | ChangePeers | ForTickets


class Attachment:
    """Everything that exists once the rank's pool is attached: both sides and the listeners for peers."""

    def __init__(
        self, local: LocalRank, transports: Transports, clock: Clock, report: Callable[[FromAgent], None]
    ) -> None:
        self.local = local
        self._clock = clock
        self.outgoing = HandoffSender(local, transports, clock, report)
        self.incoming = HandoffReceiver(local, clock, report, self.outgoing.has_link)
        attach = local.attach
        self._acceptor = LinkAcceptor(local, transports, self.incoming, report)
        self._tasks: list[asyncio.Task[None]] = []
        mapped_path = tcp = ""
        accepted = offered(local, transports.host)
        if MAPPED in accepted:
            mapped_path = attach.link_socket
            self._listen(listen_unix(mapped_path))
        if any(kind != MAPPED for kind in accepted):
            listener = listen_tcp(attach.bind_host)
            tcp = tcp_address(listener)
            self._listen(listener)
        self.attached = Attached(local.host_id, mapped_path, tcp, local.device, local.machine_id, accepted)

    def _listen(self, listener: socket.socket) -> None:
        self._tasks.append(asyncio.create_task(serve(listener, self._acceptor.accept)))

    def change_peers(self, changed: dict[WorkerEpoch, dict[int, Peer]], gone: set[WorkerEpoch]) -> None:
        self.outgoing.change_peers(changed, gone)
        self.incoming.change_peers(changed, gone)

    def report_links(self) -> None:
        self.outgoing.report_links()
        self.incoming.report_links()

    def fail_all(self, reason: str) -> None:
        self.outgoing.fail_all(HandoffCause.CANCELLED, reason)
        self.incoming.fail_all(HandoffCause.CANCELLED, reason)

    def census(self) -> Census:
        outgoing, incoming = self.outgoing, self.incoming
        return Census(
            sending=outgoing.sending_count,
            receiving=incoming.receiving_count,
            waiting=outgoing.waiting_count,
            links_out=outgoing.ready_links,
            links_in=incoming.ready_links,
        )

    def tick(self) -> None:
        self.outgoing.tick()
        self.incoming.tick()
        self._rest_links()

    def _rest_links(self) -> None:
        """Closes the links that were not used for longest, if many are open: each may hold a communicator."""
        excess = self.outgoing.ready_links + self.incoming.ready_links - WARM_LINKS
        if excess <= 0:
            return
        unused: list[OutLink | InLink] = [*self.outgoing.unused_links(), *self.incoming.unused_links()]
        unused.sort(key=lambda link: link.used_s)
        now_s = self._clock.now_s()
        for link in unused[:excess]:
            if now_s - link.used_s >= REST_AFTER_S:
                link.rest()


class Agent:
    """The transfer agent of one rank.

    Args:
        path: unix socket for the rank and the leader.
        transports: how links move bytes.
    """

    def __init__(self, path: Path, transports: Transports, clock: Clock) -> None:
        self._path = path
        self._transports = transports
        transports.threads.on_hung = _end_hung
        self._clock = clock
        self._attachment: Attachment | None = None
        self._peers: dict[WorkerEpoch, dict[int, Peer]] = {}
        self._leaders: list[Channel[FromLeader]] = []
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Runs until the rank disconnects, or `stop`."""
        listener = listen_unix(str(self._path))
        tasks = [asyncio.create_task(serve(listener, self._connection)), asyncio.create_task(self._tick())]
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        if self._attachment is not None:
            self._attachment.fail_all("the transfer agent is stopping")
        await asyncio.sleep(0)  # sends queued messages
        for task in tasks:
            if task.done():
                task.result()

    def stop(self) -> None:
        self._ended.set()

    # --- connections -------------------------------------------------------------------------------------------

    async def _connection(self, raw: socket.socket) -> None:
        """Serves one control connection. An error ends only this connection."""
        fds: list[int] = []
        try:
            with raw:
                if not peer_is_same_user(raw):
                    return
                async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                    body, fds = await receive_first(raw)
                first = _FIRST.decode(body)
                stream = await asyncio.open_unix_connection(sock=raw.dup())
            if isinstance(first, Lead):
                await self._serve_leader(Channel(*stream, FromLeader))
            else:
                await self._serve_rank(first, fds, Channel(*stream, FromRank))
        except (HandoffFault, ChannelError, msgspec.MsgspecError, UnicodeDecodeError, OSError, TimeoutError) as error:
            log.warning("control connection closed: %s", str(error) or type(error).__name__)
        finally:
            for fd in fds:
                os.close(fd)

    async def _serve_rank(self, attach: AttachPool, fds: list[int], channel: Channel[FromRank]) -> None:
        try:
            if self._attachment is not None:
                raise protocol_fault("attach: expected one rank, but a rank is attached already")
            attachment = self._attach(attach, fds)
            channel.send(attachment.attached)
            self._report(attachment.attached)
            attachment.change_peers(self._peers, set())
            try:
                async for message in channel:
                    match message:
                        case LayerDone():
                            attachment.outgoing.layer_done(message)
                        case BeginStep():
                            attachment.outgoing.begin_step(message)
            finally:
                log.info("the rank disconnected")
                self.stop()
        finally:
            channel.close()

    def _attach(self, attach: AttachPool, fds: list[int]) -> Attachment:
        """Raises HandoffFault (protocol) or OSError."""
        if len(attach.ticket_key) != KEY_BYTES:
            raise protocol_fault(f"attach: expected a key of {KEY_BYTES} bytes")
        pool = open_pool(pool_layout(attach.layout), attach.memory, fds, writable=True)
        try:
            tls = RenewedTls(attach.tls, peer=attach.tls.peer) if attach.tls is not None else None
        except ConfigError as error:
            raise HandoffFault(HandoffCause.TRANSPORT, f"attach: {error.message}") from error
        if not isinstance(pool, PoolMap):
            self._transports.threads.start(partial(_choose_kernels, pool))
        pool_fd = os.dup(fds[0]) if fds else None
        local = LocalRank(attach, pool, pool_fd, host_id(), machine_id(), make_host_staging(pool), tls)
        self._attachment = Attachment(local, self._transports, self._clock, self._report)
        log.info("attached rank %d of %s, %d blocks", attach.rank, attach.worker_id, attach.layout.num_blocks)
        return self._attachment

    async def _serve_leader(self, channel: Channel[FromLeader]) -> None:
        self._leaders.append(channel)
        if self._attachment is not None:
            channel.send(self._attachment.attached)
            self._attachment.report_links()
        try:
            async for message in channel:
                self._handle(message)
        finally:
            self._leaders.remove(channel)
            channel.close()
            if not self._leaders and self._attachment is not None:
                self._attachment.fail_all("the leader disconnected")

    def _handle(self, message: FromLeader) -> None:
        attachment = self._attachment
        if isinstance(message, SetPeers | ChangePeers):
            self._change_peers(message)
        elif attachment is None:
            self._answer_unattached(message)
        else:
            self._handle_attached(attachment, message)

    def _change_peers(self, message: SetPeers | ChangePeers) -> None:
        named: dict[WorkerEpoch, dict[int, Peer]] = {}
        for peer in message.peers if isinstance(message, SetPeers) else message.changed:
            named.setdefault((peer.worker_id, peer.epoch), {})[peer.rank] = peer
        gone = self._peers.keys() - named.keys() if isinstance(message, SetPeers) else set(message.gone)
        changed = {name: ranks for name, ranks in named.items() if self._peers.get(name) != ranks}
        self._peers = {name: ranks for name, ranks in self._peers.items() if name not in gone} | changed
        if self._attachment is not None:
            self._attachment.change_peers(changed, set(gone))

    def _handle_attached(self, attachment: Attachment, message: ForTickets) -> None:
        match message:
            case OpenReceive():
                attachment.incoming.open_receive(message)
            case CloseReceive():
                attachment.incoming.close_receive(message)
            case OpenSend():
                attachment.outgoing.open_send(message)
            case CloseSend():
                attachment.outgoing.close_send(message)
            case StillComputing():
                attachment.outgoing.still_computing()
            case TakeCensus():
                self._report(attachment.census())

    def _answer_unattached(self, message: ForTickets) -> None:
        """Answers while no pool is attached, so no ticket is known."""
        reason = "the rank's pool is not attached yet"
        match message:
            case OpenReceive(ticket_id=ticket_id):
                self._report(ReceiveFailed(ticket_id, HandoffCause.TRANSPORT.value, reason))
            case OpenSend(ticket_id=ticket_id):
                self._report(SendFailed(ticket_id, HandoffCause.TRANSPORT.value, reason))
            case CloseReceive(ticket_id=ticket_id):
                self._report(ReceiveClosed(ticket_id))
            case CloseSend(ticket_id=ticket_id):
                self._report(SendClosed(ticket_id))
            case StillComputing():
                pass
            case TakeCensus():
                self._report(Census(0, 0, 0, 0, 0))

    def _report(self, message: FromAgent) -> None:
        for leader in self._leaders:
            leader.send(message)

    async def _tick(self) -> None:
        """Checks deadlines, twice a second."""
        while True:
            await asyncio.sleep(MAX_TICK_S)
            if self._attachment is not None:
                self._attachment.tick()


def host_id() -> str:
    """16 hex digits. Processes with equal ids can share memory and unix sockets, so they can use `mapped`.

    The digest of the boot id, the user id, and the network and mount namespaces.
    """
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(os.getuid())]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def machine_id() -> str:
    """16 hex digits, equal in all containers of one machine."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(boot_id.encode()).hexdigest()[:16]


def _choose_kernels(pool: DevicePool) -> None:
    """Before the first link needs them, which waits for them a while."""
    try:
        pool.choose_kernels()
    except (DeviceLost, HandoffFault) as error:  # if the device is lost, so says the first link, and the agent ends
        log.warning("copying KV blocks by torch's operations: the kernels could not be chosen: %s", error)


def _end_hung(thread: str) -> None:
    """Ends the process because a hung thread may still read or write blocks.

    It reports nothing about its handoffs: peers and leader see their connections end, and the supervisor starts another
    agent.
    """
    log.error("%s: an operation on a piece hangs; exiting", thread)
    logging.shutdown()
    os._exit(HUNG_EXIT_CODE)


async def serve_agent(path: Path, transports: Transports) -> None:
    agent = Agent(path, transports, SystemClock())
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, agent.stop)
    await agent.run()


def main(transports: Transports | None = None, arguments: list[str] | None = None) -> None:
    """Runs the agent process. Tests pass `transports` that inject faults."""
    parser = argparse.ArgumentParser(prog="python -m kvtransfer.agent", description="A rank's transfer agent.")
    parser.add_argument("--socket", type=Path, required=True, help="unix socket for the rank and its leader")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--log-format", choices=[*LogFormat], type=LogFormat, default=LogFormat.TEXT)
    options = parser.parse_args(arguments)
    setup_logging(options.log_level, process=options.socket.stem, log_format=options.log_format)
    digest.native()  # may compile it, which would delay links
    try:
        asyncio.run(serve_agent(options.socket, transports or Transports()))
    except OSError as error:
        log.error("error: --socket: cannot listen on %s: %s", options.socket, error)
        os._exit(2)
    logging.shutdown()
    os._exit(0)  # a link's thread may hang in a collective operation and would block a normal exit
