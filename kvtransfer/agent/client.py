"""A rank's connection to a transfer agent. Sending only queues, so the engine's step loop never waits."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtransfer.agent.process import AgentProcess, PidfdProcess
from kvtransfer.connection.sockets import connect_unix, peer_pid, send_first
from kvtransfer.control import Attached, AttachPool, BeginStep, FromAgent, LayerDone, Lead, Range
from tandem.backoff import Backoff
from tandem.rpc.channel import Channel, ChannelError, ThreadSender, encode
from tandem.scheduler.plan import ExportRange

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.02
EXIT_GRACE_S = 1.0
STUCK_S = 10.0


@dataclass(frozen=True, slots=True)
class _Connection:
    socket_path: Path
    first: AttachPool | Lead
    fd: int | None
    on_message: Callable[[FromAgent], None]
    on_lost: Callable[[], None]
    on_connected: Callable[[], None]
    on_stuck: Callable[[int], None]


class AgentClient:
    """Keeps one connection to an agent, and reconnects after the agent restarts.

    Args:
        loop: an event loop running in another thread; None: the client runs its own in a daemon thread.
        open_process: finds the process with an id.
        grace_s: from the end of an agent's connection to its kill.
        stuck_s: from the kill to `on_stuck`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        open_process: Callable[[int], AgentProcess] = PidfdProcess,
        grace_s: float = EXIT_GRACE_S,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._grace_s, self._stuck_s = grace_s, stuck_s
        self._loop = loop or _start_loop()
        self._open_process = open_process
        self._process: AgentProcess | None = None
        self._sender: ThreadSender | None = None
        self._pid: int | None = None
        self._running: Future[None] | None = None

    def connect(
        self,
        socket_path: Path | str,
        first: AttachPool | Lead,
        fd: int | None,
        on_message: Callable[[FromAgent], None],
        on_lost: Callable[[], None],
        on_connected: Callable[[], None] | None = None,
        on_stuck: Callable[[int], None] | None = None,
    ) -> None:
        """Starts connecting and returns at once. The callbacks run on the client's loop and must not block.

        Args:
            first: sent first on every new connection. `AttachPool` is sent with `fd`, which the caller keeps open and
                owns.
            on_connected: an agent with an attached pool is connected; called before its `Attached`.
            on_lost: the agent is gone, with all its state. For a leader (`Lead`), its process has ended, so it writes
                no more. It is killed if only its connection ended.
            on_stuck: the agent with this process id was killed and does not end. `on_lost` is called when it does.
        """
        connection = _Connection(
            Path(socket_path), first, fd, on_message, on_lost, on_connected or _nothing, on_stuck or _log_stuck
        )
        self._running = asyncio.run_coroutine_threadsafe(self._run(connection), self._loop)

    @property
    def pid(self) -> int | None:
        """The agent's process id, from the connection until the process has ended."""
        return self._pid

    def send(self, message: msgspec.Struct) -> None:
        """Sends from any thread; never blocks. Without a connection the message is dropped; `on_lost` was called."""
        if (sender := self._sender) is not None:
            sender.send(message)

    def close(self) -> None:
        """Stops. No callback is called once the loop has processed this."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self, connection: _Connection) -> None:
        try:
            await self._connect_forever(connection)
        finally:
            self._release()

    async def _connect_forever(self, connection: _Connection) -> None:
        backoff = Backoff(first_s=FIRST_RETRY_S, most_s=0.5)
        while True:
            try:
                reader, writer = await self._open(connection)
            except OSError:
                await backoff.wait()  # the agent is starting
                continue
            backoff.reset()
            self._sender = sender = ThreadSender(writer)
            try:
                await self._listen(Channel(reader, writer, FromAgent), connection)
            except ChannelError as error:
                log.warning("invalid message from the transfer agent: %s", error)
            finally:
                self._sender = None
                sender.close()
                writer.close()
            await self._wait_end(connection)
            connection.on_lost()
            await asyncio.sleep(FIRST_RETRY_S)

    async def _open(self, connection: _Connection) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = await connect_unix(str(connection.socket_path))
        try:
            self._pid = peer_pid(raw)
            if isinstance(connection.first, Lead):
                self._process = self._process_of(self._pid)
            await send_first(raw, encode(connection.first), [] if connection.fd is None else [connection.fd])
            return await asyncio.open_unix_connection(sock=raw)
        except BaseException:
            raw.close()
            self._release()
            raise

    def _process_of(self, pid: int) -> AgentProcess | None:
        """None: an agent within this process, as in tests, or one whose end cannot be seen."""
        if pid == os.getpid():
            return None
        try:
            return self._open_process(pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            log.warning("cannot see the end of the transfer agent (pid %d): no pidfd here (%s)", pid, error)
            return None

    async def _wait_end(self, connection: _Connection) -> None:
        process, pid = self._process, self._pid
        if process is not None and pid is not None and not await process.ended(self._grace_s):
            log.warning("the transfer agent (pid %d) closed its connection and did not end: killing it", pid)
            process.kill()
            if not await process.ended(self._stuck_s):
                connection.on_stuck(pid)
                while not await process.ended(self._stuck_s):
                    pass
        self._release()

    def _release(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = self._pid = None

    async def _listen(self, channel: Channel[FromAgent], connection: _Connection) -> None:
        attached = False
        async for message in channel:
            if isinstance(message, Attached) and not attached:
                attached = True
                connection.on_connected()
            connection.on_message(message)


class RankExporter:
    """`tandem.engine.api.KvExporter` of one rank. Reports finished blocks and layers to the rank's agent."""

    def __init__(self, client: AgentClient) -> None:
        self._client = client

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self._client.send(BeginStep(tuple(_on_the_wire(each) for each in ranges)))

    def layer_done(self, layer: int) -> None:
        self._client.send(LayerDone(layer))


def _on_the_wire(each: ExportRange) -> Range:
    return Range(
        export_id=each.request_id,
        first_block=each.first_block,
        block_ids=each.block_ids,
        last_block_tokens=each.last_block_tokens,
        in_cache=each.in_cache,
        is_last=each.is_last,
    )


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agent-client", daemon=True).start()
    return loop


def _log_stuck(pid: int) -> None:
    log.error("the transfer agent (pid %d) was killed and does not end", pid)


def _nothing() -> None:
    """Default of `on_connected`."""
