"""One link to one epoch of one worker: a multiplexed Session stream, with a sink for each request on it.

Sending never waits; incoming frames go to the requests' sinks at once. When the stream ends, the worker cancels all of
its requests. The link calls `on_lost` of every sink, then reconnects until it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from router.prefix_index.mirror import WorkerKey
from router.workers.clock_offset import ClockOffset
from router.workers.expansions import Expansion, Expansions
from router.workers.frame_queue import FrameQueue
from router.workers.meter_history import MeterHistory
from router.workers.silence_limit import Progress
from tandem.backoff import Backoff
from tandem.errors import IncompatibleVersions, WorkerDied, WorkerLost
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.grpc_options import CLIENT_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.rpc.versions import ProtocolRange, common_version, stated_versions
from tandem.v1 import cluster_pb2, worker_pb2
from worker.wire import BEFORE_RANGES, GRAMMAR_SINCE, VERSIONS, lacks

log = logging.getLogger(__name__)

SESSION = "/tandem.v1.Worker/Session"
HELLO_TIMEOUT_S = 3.0  # plus the longest backoff: a healed network is noticed within 5 s
MAX_OUTBOX_FRAMES = 16_384
MAX_BACKOFF_S = 1.0
# What gRPC receives ahead of its reader. The rest waits at the worker, which joins it to few messages.
OPTIONS = (*CLIENT_OPTIONS, ("grpc.http2.lookahead_bytes", 4 << 10), ("grpc.http2.bdp_probe", 0))
LATE_REPORT_S = 5.0  # how long an ended request waits for the report on its handoff


class RequestSink(Protocol):
    """Receives the events of one request from its workers."""

    def on_reserved(self, link: WorkerLink, reserved: worker_pb2.Reserved) -> None: ...

    def on_handoff(self, link: WorkerLink, done: worker_pb2.HandoffDone, age_s: float) -> None:
        """`age_s`: seconds since the zero of the report's stages."""

    def on_prompt_scores(self, link: WorkerLink, scores: worker_pb2.PromptScores) -> None: ...

    def on_token(self, link: WorkerLink, token: worker_pb2.StepToken, now_s: float) -> None:
        """`now_s`: when its frame came."""

    def on_held(self, link: WorkerLink, held: worker_pb2.Held) -> None: ...

    def on_ended(self, link: WorkerLink, ended: worker_pb2.Ended) -> None: ...

    def on_lost(self, link: WorkerLink, error: WorkerLost) -> None: ...

    @property
    def stays_when_stalled(self) -> bool:
        """Whether it stays on a worker that stalls, until that goes on or dies."""

    def on_stalled(self, link: WorkerLink, error: WorkerLost) -> None:
        """As `on_lost`, but `on_stall_ended` follows."""

    def on_stall_ended(self, link: WorkerLink, *, died: bool) -> None:
        """The worker goes on, its link was lost, or it `died`: it never went on, and its engine's process ended."""


class LinkListener(Protocol):
    def link_changed(self, link: WorkerLink) -> None:
        """The link became ready or was lost."""

    def load_changed(self, link: WorkerLink) -> None:
        """The worker reported its load."""

    def work_began(self, link: WorkerLink) -> None:
        """The worker got a request from this router, and had none before."""


class _LinkBroken(Exception):
    pass


class WorkerLink:
    def __init__(
        self, info: cluster_pb2.WorkerInfo, router_id: str, listener: LinkListener, tls: ClusterTls | None = None
    ) -> None:
        self.info = info
        self.key = WorkerKey(info.worker_id, info.epoch)
        self.lacks = lacks(info)
        self.load: worker_pb2.WorkerLoad | None = None
        self.meters = MeterHistory()
        self.reaches: frozenset[tuple[str, int]] | None = None
        self.adapters: frozenset[str] = frozenset()
        self.ready = False
        self.sent_frames = 0  # of this session, waiting ones too, hello not counted
        self.seen_frames = 0  # of them, the first that the worker's last report includes
        self.progress = Progress()
        self._router_id = router_id
        self._listener = listener
        self._tls = tls
        self._sinks: dict[str, RequestSink] = {}
        self._offset = ClockOffset()
        self._late: dict[str, RequestSink] = {}  # detached, awaiting a report
        self._stalled: list[RequestSink] = []  # taken off since the last progress
        self._expansions = Expansions()
        self._outbox = FrameQueue(takes_batches=False)
        self.takes_grammars = False  # older workers do not support them; nor `min_tokens`
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"WorkerLink({self.key.worker_id}, epoch {self.key.epoch})"

    @property
    def idle(self) -> bool:
        return not self._sinks and not self._expansions

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-{self.key.worker_id}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lost("the router closed the link")

    def attach(self, wire_id: str, sink: RequestSink) -> None:
        """Delivers the worker's events for `wire_id` to `sink` from now on."""
        began = self.idle
        self._sinks[wire_id] = sink
        if began:
            self._work_began()

    def _work_began(self) -> None:
        self.progress.work_started(time.monotonic())
        self._listener.work_began(self)

    def detach(self, wire_id: str) -> None:
        """Drops later events for `wire_id`. Idempotent."""
        self._sinks.pop(wire_id, None)

    def detach_awaiting_report(self, wire_id: str) -> None:
        """As `detach`, but still delivers the report on its handoff if it arrives within `LATE_REPORT_S`."""
        if (sink := self._sinks.pop(wire_id, None)) is not None:
            self._late[wire_id] = sink
            asyncio.get_running_loop().call_later(LATE_REPORT_S, self._late.pop, wire_id, None)

    def send(self, wire_id: str, frame: worker_pb2.RouterFrame) -> None:
        """Queues a frame of a request. Drops it if the link is lost: `on_lost` was called already."""
        if self.ready:
            self.sent_frames = self._outbox.add(wire_id, frame.SerializeToString())
            self._wake.set()

    @property
    def expanding(self) -> int:
        """Prompts with images that it expands for this router."""
        return len(self._expansions)

    def expand(self, prompt: Sequence[int], images: Sequence[bytes], cache_salt: bytes) -> tuple[str, Expansion]:
        """Asks how the worker's model reads these images. Returns the wire id, which `cancel` takes, and the answer:
        InputError, or WorkerLost with the link, as which it also raises without one."""
        if not self.ready:
            raise self._lost_error(WorkerLost, "there is no link")
        began = self.idle
        asked, answer = self._expansions.ask(prompt, images, cache_salt)
        if began:
            self._work_began()
        self.send(asked.request_id, worker_pb2.RouterFrame(expand_images=asked))
        return asked.request_id, answer

    def cancel(self, wire_id: str) -> None:
        self.send(wire_id, worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id=wire_id)))

    def fail_requests(self, reason: str) -> int:
        """Takes every request off a worker that is connected but stuck, as if the worker were lost. Requests stay that
        may be what stops workers. Returns how many left."""
        leaving = {wire_id: sink for wire_id, sink in self._sinks.items() if not sink.stays_when_stalled}
        for wire_id in leaving:
            self.cancel(wire_id)
            del self._sinks[wire_id]
        self._stalled += leaving.values()
        error = self._lost_error(WorkerLost, reason)
        for wire_id in self._expansions.wire_ids():
            self.cancel(wire_id)
        self._expansions.fail(error)
        self._for_each([*leaving.values()], lambda sink: sink.on_stalled(self, error))
        return len(leaving)

    def _end_stall(self, *, died: bool) -> None:
        stalled, self._stalled = self._stalled, []
        self._for_each(stalled, lambda sink: sink.on_stall_ended(self, died=died))

    def local_s(self, worker_s: float) -> float | None:
        """Converts a time on the worker's clock to the router's."""
        return self._offset.local_s(worker_s)

    async def _run(self) -> None:
        backoff = Backoff(first_s=0.05, most_s=MAX_BACKOFF_S)
        while True:
            kind: type[WorkerLost] = WorkerLost
            try:
                async with open_channel(self.info.address, self._tls, Identity.WORKER, OPTIONS) as channel:
                    await self._session(channel)
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                typed = error_from_rpc(error)
                if isinstance(typed, IncompatibleVersions):
                    self._refused(typed)
                    return
                if isinstance(typed, WorkerDied):
                    kind = WorkerDied
            except IncompatibleVersions as error:
                self._refused(error)
                return
            except _LinkBroken as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no hello within {HELLO_TIMEOUT_S:g} s"
            except Exception:  # a bug in the handling of one frame must not leave a dead link that looks ready
                log.exception("internal error on a worker link: reconnecting", extra={"worker": self.key.worker_id})
                reason = "internal error"
            if self.ready:
                backoff.reset()
            self._lost(reason, kind)
            await backoff.wait()

    def _refused(self, error: IncompatibleVersions) -> None:
        """For as long as this epoch and this router last."""
        log.error("no link to %s: %s", self.key.worker_id, error)
        self._lost(error.message)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        session: grpc.aio.StreamStreamMultiCallable[bytes, worker_pb2.WorkerFrame] = channel.stream_stream(
            SESSION, response_deserializer=worker_pb2.WorkerFrame.FromString
        )
        call = session()
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = worker_pb2.RouterHello(
                    router_id=self._router_id,
                    protocol=self._common_version(self.info),
                    oldest_protocol=VERSIONS.oldest_protocol,
                    takes_more=True,
                )
                await call.write(worker_pb2.RouterFrame(hello=hello).SerializeToString())
                first = await call.read()
            if not isinstance(first, worker_pb2.WorkerFrame):
                # The stream ended: the status holds the worker's reason.
                raise _LinkBroken(await call.details() or "the worker ended the stream before its hello")
            self._check_hello(first)
            self._outbox = FrameQueue(takes_batches=first.hello.takes_more)
            self.takes_grammars = first.hello.protocol >= GRAMMAR_SINCE
            self.sent_frames = self.seen_frames = 0
            self.ready = True
            self._listener.link_changed(self)
            self._deliver(first)
            both = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]
            try:
                ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
                for task in ended:
                    task.result()
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        finally:
            call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, worker_pb2.WorkerFrame]) -> None:
        while isinstance(message := await call.read(), worker_pb2.WorkerFrame):
            for frame in (message, *message.more):
                self._deliver(frame)
        raise _LinkBroken(await call.details() or "the worker ended the stream")

    def _check_hello(self, frame: worker_pb2.WorkerFrame) -> None:
        hello = frame.hello
        self._common_version(hello)
        if (hello.worker_id, hello.epoch) != (self.key.worker_id, self.key.epoch):
            raise _LinkBroken(
                f"expected worker {self.key.worker_id} of epoch {self.key.epoch}, "
                f"got {hello.worker_id} of epoch {hello.epoch}"
            )

    def _common_version(self, worker: ProtocolRange) -> int:
        names = (f"router {self._router_id}", self.key.worker_id)
        return common_version(VERSIONS, stated_versions(worker, BEFORE_RANGES), names)

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, worker_pb2.WorkerFrame]) -> None:
        try:
            while True:
                while self._outbox:
                    await call.write(self._outbox.next_message())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader reports why the stream ended

    def _deliver(self, frame: worker_pb2.WorkerFrame) -> None:
        sinks = self._sinks
        now_s = time.monotonic()
        if frame.sent_at_s:
            self._offset.add_sample(frame.sent_at_s, now_s)
        for reserved in frame.reserved:
            if (sink := sinks.get(reserved.request_id)) is not None:
                sink.on_reserved(self, reserved)
        for scores in frame.prompt_scores:
            if (sink := sinks.get(scores.request_id)) is not None:
                sink.on_prompt_scores(self, scores)
        for token in frame.tokens:
            if (sink := sinks.get(token.request_id)) is not None:
                sink.on_token(self, token, now_s)
        for handoff in frame.handoffs:
            sink = sinks.get(handoff.request_id) or self._late.pop(handoff.request_id, None)
            if sink is not None:
                anchor_s = self._offset.local_s(handoff.anchor_at_s)
                sink.on_handoff(self, handoff, 0.0 if anchor_s is None else max(0.0, now_s - anchor_s))
        for held in frame.held:
            if (sink := sinks.get(held.request_id)) is not None:
                sink.on_held(self, held)
            elif not held.held:  # the move succeeded although its source has not heard so
                self.cancel(held.request_id)
        for expanded in frame.expanded:
            self._expansions.take(expanded)
        for ended in frame.ended:
            if (sink := sinks.pop(ended.request_id, None)) is not None:
                sink.on_ended(self, ended)
        self.seen_frames = max(self.seen_frames, self._outbox.seen(frame.frames_seen))
        if frame.HasField("reach"):
            self.reaches = frozenset((life.worker_id, life.epoch) for life in frame.reach.lives)
            self._listener.load_changed(self)
        if frame.HasField("adapters"):
            self.adapters = frozenset(frame.adapters.fingerprints)
            self._listener.load_changed(self)
        if frame.reserved or frame.tokens or frame.handoffs or frame.ended or frame.prompt_scores:
            self.progress.request_event(now_s)
        if frame.computing:
            self.progress.computing(now_s)
        if frame.HasField("meters"):
            self.meters.take(frame.meters, now_s)
        if frame.HasField("load"):
            self._take_load(frame.load, now_s)
        if self._stalled and self.progress.silent_s(now_s) == 0.0:
            self._end_stall(died=False)
        if len(self._outbox) > MAX_OUTBOX_FRAMES:
            raise _LinkBroken(f"the worker left {MAX_OUTBOX_FRAMES} frames unread")

    def _take_load(self, load: worker_pb2.WorkerLoad, now_s: float) -> None:
        self.load = load
        self.progress.load_reported(
            now_s,
            steps=load.steps if load.HasField("steps") else None,
            has_work=load.running_requests + load.waiting_requests > 0,
            waiting_tokens=load.waiting_tokens,
        )
        self._listener.load_changed(self)

    def _lost(self, reason: str, kind: type[WorkerLost] = WorkerLost) -> None:
        was_ready, self.ready = self.ready, False
        self.load = None
        self.reaches = None
        self.adapters = frozenset()
        self.progress = Progress()
        self._outbox = FrameQueue(takes_batches=False)
        self._late.clear()
        self._end_stall(died=kind is WorkerDied)
        self._report_lost(reason, kind)
        if was_ready:
            log.warning("worker link lost", extra={"worker": self.key.worker_id, "reason": reason})
            self._listener.link_changed(self)

    def _report_lost(self, reason: str, kind: type[WorkerLost] = WorkerLost) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        error = self._lost_error(kind, reason)
        self._expansions.fail(error)
        self._for_each(sinks, lambda sink: sink.on_lost(self, error))

    def _lost_error(self, kind: type[WorkerLost], reason: str) -> WorkerLost:
        return kind(f"worker {self.key.worker_id} was lost ({reason}); a retry may succeed", retry_after_s=1.0)

    def _for_each(self, sinks: list[RequestSink], tell: Callable[[RequestSink], None]) -> None:
        for sink in sinks:
            try:
                tell(sink)
            except Exception:  # a bug in one request's handling must not stop the others from ending
                log.exception("a request failed to handle the loss of its worker", extra={"worker": self.key.worker_id})
