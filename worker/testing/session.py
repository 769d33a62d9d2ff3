"""Drives live workers over the Worker protocol, one request at a time. For tests and benchmarks.

The caller chooses the workers of each request, so a test can fill the prefix cache of one worker and not the other.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import grpc.aio

from tandem.errors import TandemError, WorkerDied, WorkerLost
from tandem.request import FinishReason, SamplingParams
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from worker.wire import PROTOCOL_VERSION, parse_error, sampling_frame

WireEvent = worker_pb2.StepToken | worker_pb2.Reserved | worker_pb2.HandoffDone | worker_pb2.Ended
_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(slots=True)
class RequestResult:
    """Tokens and figures of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    cached_tokens_prefill: int = 0
    cached_tokens_decode: int = 0
    kv_bytes: int = 0


class WorkerSession:
    """One router session with one worker. Events are queued by request id."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        self._stub = stub
        self._outgoing: asyncio.Queue[worker_pb2.RouterFrame | None] = asyncio.Queue()
        self._events: defaultdict[str, asyncio.Queue[WireEvent | None]] = defaultdict(asyncio.Queue)
        self.hello = worker_pb2.WorkerHello()
        self._has_hello = asyncio.Event()
        self.load = worker_pb2.WorkerLoad()  # as last reported
        self.frames_seen = 0
        self.lost = False
        self.died = False  # lost because the engine's process ended by itself

    async def _frames(self) -> AsyncIterator[worker_pb2.RouterFrame]:
        hello = worker_pb2.RouterHello(router_id="test", protocol=PROTOCOL_VERSION)
        yield worker_pb2.RouterFrame(hello=hello)
        while (frame := await self._outgoing.get()) is not None:
            yield frame

    async def run(self) -> None:
        try:
            async for frame in self._stub.Session(self._frames()):
                if frame.HasField("hello"):
                    self.hello = frame.hello
                    self._has_hello.set()
                if frame.HasField("load"):
                    self.load = frame.load
                self.frames_seen = frame.frames_seen
                events: list[WireEvent] = [*frame.reserved, *frame.tokens, *frame.handoffs, *frame.ended]
                for event in events:
                    self._events[event.request_id].put_nowait(event)
        except grpc.aio.AioRpcError as error:
            self.died = isinstance(error_from_rpc(error), WorkerDied)
        finally:
            self.lost = True
            for queue in self._events.values():
                queue.put_nowait(None)

    async def wait_hello(self) -> None:
        async with asyncio.timeout(60.0):
            await self._has_hello.wait()

    def send(self, frame: worker_pb2.RouterFrame) -> None:
        self._outgoing.put_nowait(frame)

    def close(self) -> None:
        self._outgoing.put_nowait(None)

    def cancel(self, request_id: str) -> None:
        self.send(worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id=request_id)))

    async def event(self, request_id: str) -> WireEvent:
        """The request's next event. Raises what the worker reported, or WorkerLost."""
        async with asyncio.timeout(60.0):
            event = await self._events[request_id].get()
        if event is None:
            raise WorkerLost("the worker's stream ended")
        if isinstance(event, worker_pb2.Ended) and event.HasField("error"):
            raise parse_error(event.error)
        return event

    async def state(self) -> worker_pb2.WorkerState:
        return await self._stub.GetState(worker_pb2.GetStateRequest())


@asynccontextmanager
async def open_session(address: str) -> AsyncIterator[WorkerSession]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        session = WorkerSession(stub)
        running = asyncio.create_task(session.run())
        try:
            await session.wait_hello()
            yield session
        finally:
            session.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class ManualRouter:
    """Sends single requests to workers that the caller chooses."""

    def __init__(self) -> None:
        self._ids = count(1)

    def work(self, prompt: Sequence[int], sampling: SamplingParams, salt: bytes = b"") -> worker_pb2.Work:
        wire = sampling_frame(sampling)
        return worker_pb2.Work(request_id=f"test-{next(self._ids)}", prompt=prompt, sampling=wire, cache_salt=salt)

    async def generate(self, decode: WorkerSession, prompt: Sequence[int], sampling: SamplingParams) -> RequestResult:
        """Prefills and decodes on one worker."""
        work = self.work(prompt, sampling)
        decode.send(worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work)))
        answer = RequestResult()
        await self._collect(decode, work.request_id, answer)
        return answer

    async def generate_together(
        self, decode: WorkerSession, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[RequestResult]:
        """Like `generate` for each prompt, but sends all requests in one message."""
        works = [self.work(prompt, sampling) for prompt in prompts]
        first, *rest = (worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work)) for work in works)
        first.more.extend(rest)
        decode.send(first)
        answers = [RequestResult() for _ in works]
        for work, answer in zip(works, answers, strict=True):
            await self._collect(decode, work.request_id, answer)
        return answers

    async def handoff(
        self,
        prefill: WorkerSession,
        decode: WorkerSession,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        use_decode_cache: bool = True,
    ) -> RequestResult:
        """Prefills on one worker and decodes on the other. On failure cancels the request on both, as a router does."""
        work = self.work(prompt, sampling)
        try:
            return await self._handoff(prefill, decode, work, sampling, use_decode_cache)
        except TandemError:
            prefill.cancel(work.request_id)
            decode.cancel(work.request_id)
            raise

    async def _handoff(
        self,
        prefill: WorkerSession,
        decode: WorkerSession,
        work: worker_pb2.Work,
        sampling: SamplingParams,
        use_decode_cache: bool,
    ) -> RequestResult:
        answer = RequestResult()
        ticket = await self.reserve(prefill, decode, work, use_decode_cache=use_decode_cache)
        answer.cached_tokens_decode = ticket.cached_tokens
        first = await self.prefill(prefill, work, ticket)
        answer.cached_tokens_prefill = first.cached_tokens
        self._take(answer, first)
        if sampling.max_tokens == 1 or first.token_id in sampling.stop_token_ids:
            decode.cancel(work.request_id)
            answer.reason = FinishReason.STOP if first.token_id in sampling.stop_token_ids else FinishReason.LENGTH
            return answer
        join = worker_pb2.Join(request_id=work.request_id, first_token=first.token_id)
        decode.send(worker_pb2.RouterFrame(join=join))
        collecting = asyncio.create_task(self._collect(decode, work.request_id, answer))
        sending = asyncio.create_task(prefill.event(work.request_id))  # the prefill worker's last event
        try:
            await asyncio.wait((collecting, sending), return_when=asyncio.FIRST_EXCEPTION)
            if not collecting.done():
                sending.result()  # it failed, so the blocks will not arrive
            collecting.result()
        finally:
            collecting.cancel()
            sending.cancel()
        if ticket.cached_tokens >= len(work.prompt):  # nothing was handed off
            ended = sending.result()
            if not isinstance(ended, worker_pb2.Ended) or ended.finish_reason:
                raise WorkerLost(f"expected the prefill worker to say that it is done, got {ended}")
        return answer

    async def reserve(
        self,
        prefill: WorkerSession,
        decode: WorkerSession,
        work: worker_pb2.Work,
        *,
        use_decode_cache: bool = True,
    ) -> worker_pb2.HandoffTicket:
        reserve = worker_pb2.Reserve(
            work=work,
            prefill_worker=prefill.hello.worker_id,
            prefill_epoch=prefill.hello.epoch,
            use_prefix_cache=use_decode_cache,
        )
        decode.send(worker_pb2.RouterFrame(reserve=reserve))
        reserved = await decode.event(work.request_id)
        if not isinstance(reserved, worker_pb2.Reserved):
            raise WorkerLost(f"expected Reserved, got {type(reserved).__name__}")
        return reserved.ticket

    async def prefill(
        self, prefill: WorkerSession, work: worker_pb2.Work, ticket: worker_pb2.HandoffTicket
    ) -> worker_pb2.StepToken:
        prefill.send(worker_pb2.RouterFrame(prefill=worker_pb2.Prefill(work=work, ticket=ticket)))
        while True:
            event = await prefill.event(work.request_id)
            if isinstance(event, worker_pb2.StepToken):
                return event

    async def _collect(self, decode: WorkerSession, request_id: str, answer: RequestResult) -> None:
        while answer.reason is None:
            match await decode.event(request_id):
                case worker_pb2.StepToken() as token:
                    if not answer.tokens:
                        answer.cached_tokens_decode = token.cached_tokens
                    self._take(answer, token)
                case worker_pb2.HandoffDone() as done:
                    answer.kv_bytes = done.bytes
                case worker_pb2.Ended() as ended:
                    answer.reason = _REASONS[ended.finish_reason]

    def _take(self, answer: RequestResult, token: worker_pb2.StepToken) -> None:
        answer.tokens.append(token.token_id)
        if token.HasField("logprobs"):
            answer.logprobs.append(token.logprobs.logprob)


async def assert_conserved(*sessions: WorkerSession, timeout_s: float = 30.0) -> None:
    """Waits until on every worker no block is leased or in use, and free and cached blocks add up to the total.

    Raises:
        TandemError: that did not happen within `timeout_s`; the message has the counts.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    for session in sessions:
        while True:
            try:
                load = (await session.state()).load
            except grpc.aio.AioRpcError:  # its engine is being replaced, or busy
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.05)
                continue
            blocks, host = load.blocks, load.host_blocks
            conserved = blocks.free + blocks.cached + blocks.leased + blocks.in_use == blocks.total
            conserved = conserved and host.free + host.used == host.total
            if conserved and blocks.leased == blocks.in_use == 0:
                break
            if asyncio.get_running_loop().time() > deadline:
                raise TandemError(f"blocks of {session.hello.worker_id} leaked or are still in use: {load}")
            await asyncio.sleep(0.05)
