"""The service process of a worker: serves the routers' gRPC streams, registers the worker, publishes its cache events.

Torch-free, and a separate process, so no server shares the step loop's interpreter. Frames pass to the leader (rank 0)
as bytes. When the leader exits, this process exits too, and the supervisor then stops the worker.

    python -m worker.service --launch FILE
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.config.launch import WorkerLaunch
from tandem.errors import DeadlineExceeded, InputError, TandemError, UnavailableError, WorkerDied
from tandem.rpc.channel import Channel
from tandem.rpc.grpc_errors import abort
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, add_port, make_server
from tandem.rpc.identity import Identity
from tandem.rpc.versions import common_version, stated_versions
from tandem.telemetry.logs import setup_logging
from tandem.v1 import cluster_pb2, worker_pb2
from worker.engine_watch import HangWatch, RankEnds
from worker.event_publisher import EventPublisher
from worker.exit_codes import ENGINE_HUNG_EXIT_CODE
from worker.messages import (
    CacheChanged,
    Computing,
    FromRouter,
    LeaderReady,
    LeaderToService,
    Leaving,
    Peers,
    SessionClosed,
    SessionOpened,
    StateAnswer,
    StateQuery,
    ToRouter,
    WantedAdapters,
)
from worker.registration import Registration
from worker.waiting_frames import messages
from worker.wire import BEFORE_RANGES, VERSIONS

log = logging.getLogger(__name__)

QUEUED_FRAMES = 4096  # per router; a router that leaves more unread is disconnected
STATE_TIMEOUT_S = 2.0
SESSIONS_END_S = 2.0
LEAVING_S = 0.1  # a leader says that it stops before it stops the other ranks
HELLO_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = ("grpc.max_receive_message_length", 48 << 20)  # a request may have images; the leader takes 64 MiB
SERVICE = "tandem.v1.Worker"
ALLOWED = {
    f"/{SERVICE}/Session": frozenset({Identity.ROUTER}),
    f"/{SERVICE}/GetState": frozenset({Identity.CONTROLLER, Identity.ROUTER, Identity.ADMIN}),
}


class LeaderLink:
    """The connection to rank 0, with the router sessions and state queries that wait for its messages."""

    def __init__(
        self,
        channel: Channel[LeaderToService],
        publisher: EventPublisher,
        on_info: Callable[[cluster_pb2.WorkerInfo], None],
        hang_timeout_s: float,
    ) -> None:
        self.channel = channel
        self.died = False
        self.hangs = HangWatch(lambda: self.channel.send(StateQuery(0)), hang_timeout_s)
        self._all_closed = asyncio.Event()
        self._is_leaving = False
        self._publisher = publisher
        self._on_info = on_info
        self._sessions: dict[int, asyncio.Queue[bytes | None]] = {}
        self._session_ids = count(1)
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._query_ids = count(1)

    def open_session(self, router_id: str) -> tuple[int, asyncio.Queue[bytes | None]]:
        session = next(self._session_ids)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED_FRAMES)
        self._sessions[session] = queue
        self.channel.send(SessionOpened(session, router_id))
        return session, queue

    def close_session(self, session: int) -> None:
        if self._sessions.pop(session, None) is not None:
            self.channel.send(SessionClosed(session))
            if not self._sessions:
                self._all_closed.set()

    async def query_state(self) -> bytes:
        query = next(self._query_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self.channel.send(StateQuery(query))
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"the engine did not answer within {STATE_TIMEOUT_S:g} s: try again") from None
        finally:
            del self._queries[query]

    def handle(self, message: LeaderToService) -> None:
        self.hangs.heard()
        match message:
            case ToRouter(session=session, frame=frame):
                self._to_router(session, frame)
            case CacheChanged(stored=stored, hashes=hashes):
                self._publisher.publish(stored, hashes)
            case StateAnswer(query=query, state=state):
                if (answer := self._queries.get(query)) and not answer.done():
                    answer.set_result(state)
            case Leaving():
                self._is_leaving = True
            case LeaderReady(info=info):
                self._on_info(cluster_pb2.WorkerInfo.FromString(info))
            case Computing():
                pass  # that it came is all that it says

    async def lost_rank(self, ranks: RankEnds) -> bool:
        """Whether another rank has died, and with it the worker."""
        if ranks.any_ended():
            await asyncio.sleep(LEAVING_S)
            self.died = self.died or not self._is_leaving
        return self.died

    async def gone(self) -> None:
        """Its connection ended, or it hangs. Returns when the routers' sessions have ended, which learn why."""
        self.died = self.died or not self._is_leaving
        log.warning("the leader %s: exiting", "died" if self.died else "is gone")
        self._all_closed.clear()
        for queue in self._sessions.values():
            if not queue.full():
                queue.put_nowait(None)
        if self._sessions:
            with suppress(TimeoutError):
                async with asyncio.timeout(SESSIONS_END_S):
                    await self._all_closed.wait()

    def _to_router(self, session: int, frame: bytes) -> None:
        queue = self._sessions.get(session)
        if queue is None:
            return
        try:
            queue.put_nowait(frame)
        except asyncio.QueueFull:
            log.warning("router session %d left %d frames unread: ending it", session, QUEUED_FRAMES)
            self.close_session(session)
            queue.get_nowait()  # makes room for the end mark
            queue.put_nowait(None)


class WorkerService:
    """The gRPC methods. Session frames stay bytes on both sides."""

    def __init__(self, launch: WorkerLaunch, leader: LeaderLink) -> None:
        self._launch = launch
        self._leader = leader

    async def session(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello, protocol = await self._read_hello(frames)
        except TimeoutError:
            await abort(context, DeadlineExceeded(f"frame: expected a hello within {HELLO_TIMEOUT_S:g} s, got none"))
        except DecodeError as error:
            await abort(context, InputError(f"frame: expected a RouterFrame: {error}", field="frame"))
        except TandemError as error:
            await abort(context, error)
        session, queue = self._leader.open_session(hello.router_id)
        reading = asyncio.create_task(self._read(session, frames, queue))
        answer = worker_pb2.WorkerHello(
            worker_id=self._launch.worker_id,
            epoch=self._launch.epoch,
            protocol=protocol,
            oldest_protocol=VERSIONS.oldest_protocol,
            takes_more=True,
        )
        try:
            yield worker_pb2.WorkerFrame(hello=answer).SerializeToString()
            async for message in messages(queue, takes_more=hello.takes_more):
                yield message
            if self._leader.died:
                await abort(context, WorkerDied(f"{self._launch.worker_id}: the process of its engine ended"))
        finally:
            reading.cancel()
            self._leader.close_session(session)

    async def _read_hello(self, frames: AsyncIterator[bytes]) -> tuple[worker_pb2.RouterHello, int]:
        """And the protocol version of the session."""
        async for raw in frames:
            frame = worker_pb2.RouterFrame.FromString(raw)
            kind = frame.WhichOneof("frame")
            if kind != "hello" or not frame.hello.router_id:
                raise InputError(f"frame: expected a hello with a router_id first, got {kind or 'none'}", field="frame")
            names = (self._launch.worker_id, f"router {frame.hello.router_id}")
            return frame.hello, common_version(VERSIONS, stated_versions(frame.hello, BEFORE_RANGES), names)
        raise InputError("frame: expected a hello, got the end of the stream", field="frame")

    async def _read(self, session: int, frames: AsyncIterator[bytes], queue: asyncio.Queue[bytes | None]) -> None:
        """Ends the session with the stream. A full queue is left alone: `_to_router` ends that session."""
        try:
            async for raw in frames:
                self._leader.channel.send(FromRouter(session, raw))
        finally:
            if not queue.full():
                queue.put_nowait(None)

    async def get_state(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            return await self._leader.query_state()
        except TandemError as error:
            await abort(context, error)
            raise  # abort raises; the type checker needs this line

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Session": grpc.stream_stream_rpc_method_handler(self.session),
                "GetState": grpc.unary_unary_rpc_method_handler(self.get_state),
            },
        )


async def connect_leader(launch: WorkerLaunch) -> Channel[LeaderToService]:
    """Waits until rank 0 listens. The controller bounds how long a start may take."""
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(str(launch.leader_socket), limit=1 << 20)
            return Channel(reader, writer, LeaderToService)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(0.05)


async def serve(launch: WorkerLaunch) -> int:
    """Returns the exit code."""
    channel = await connect_leader(launch)
    received = aiter(channel)
    first = await anext(received, None)
    if not isinstance(first, LeaderReady):
        raise UnavailableError(f"leader: expected LeaderReady as the first message, got {type(first).__name__}")
    info = cluster_pb2.WorkerInfo.FromString(first.info)
    publisher = EventPublisher(
        cluster=launch.cluster, worker_id=launch.worker_id, epoch=launch.epoch, redis_url=launch.redis_url
    )
    tls = ClusterTls.maybe(launch.cluster, Identity.WORKER, launch.tls)
    registration = Registration(
        launch,
        info,
        on_peers=lambda peers: channel.send(Peers(peers)),
        on_adapters=lambda adapters: channel.send(WantedAdapters(adapters)),
        tls=tls,
    )
    leader = LeaderLink(
        channel, publisher, on_info=registration.update_agents, hang_timeout_s=launch.engine.hang_timeout_s
    )
    ranks = RankEnds(launch)
    server = make_server(tls, ALLOWED, (*SERVER_OPTIONS, MAX_MESSAGE_BYTES))
    server.add_generic_rpc_handlers((WorkerService(launch, leader).handlers(),))
    port = add_port(server, f"{launch.bind_host}:0", tls)
    await server.start()
    info.address = f"{launch.bind_host}:{port}"
    info.protocol, info.oldest_protocol = VERSIONS.protocol, VERSIONS.oldest_protocol
    info.processes.add(name="service", pid=os.getpid())
    background = [asyncio.create_task(registration.run()), asyncio.create_task(publisher.run())]
    for task in background:
        task.add_done_callback(_end_process_on_failure)
    try:
        return await _follow(leader, received, ranks, launch.engine.hang_timeout_s)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await server.stop(grace=0.5)


async def _follow(
    leader: LeaderLink, received: AsyncIterator[LeaderToService], ranks: RankEnds, hang_timeout_s: float
) -> int:
    """Handles the leader's messages until it ends or hangs, or another rank ends. Returns the exit code."""

    async def handle_messages() -> None:
        async for message in received:
            leader.handle(message)

    handling, hangs = asyncio.create_task(handle_messages()), asyncio.create_task(leader.hangs.run())
    tasks = (handling, hangs, asyncio.create_task(ranks.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not hangs.done():
            await leader.lost_rank(ranks)
        await leader.gone()
        if hangs.done():
            log.error(
                "error: the engine took no step and finished no layer for %g s (engine.hang_timeout_s): "
                "this worker is replaced",
                hang_timeout_s,
            )
            return ENGINE_HUNG_EXIT_CODE
        if handling.done():
            handling.result()
        return 0
    except asyncio.CancelledError:
        if await leader.lost_rank(ranks):  # the reason why this process is told to stop
            await leader.gone()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_process_on_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("error: %s", error)
        os.kill(os.getpid(), signal.SIGTERM)


async def run(launch: WorkerLaunch) -> int:
    serving = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda: serving.cancel() if serving else None)
    try:
        return await serve(launch)
    except asyncio.CancelledError:
        return 0  # by a signal


def main() -> None:
    parser = argparse.ArgumentParser(description="The service process of one worker.")
    parser.add_argument("--launch", type=Path, required=True)
    launch = WorkerLaunch.load(parser.parse_args().launch)
    setup_logging(launch.log_level, process=f"{launch.worker_id}/service", log_format=launch.log_format)
    raise SystemExit(asyncio.run(run(launch)))


if __name__ == "__main__":
    main()
