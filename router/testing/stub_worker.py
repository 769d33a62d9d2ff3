"""A stub worker: the real protocol without an engine. For tests of the router and of clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from kvtransfer.causes import HandoffCause
from router.testing.canary import canary_answer, is_canary, wire_id
from tandem.config.model import Role
from tandem.engine.api import Capability
from tandem.errors import ErrorCode, TandemError
from tandem.images import ExpandedPrompt
from tandem.kvcache.layout import blocks_for
from tandem.rpc.directory import WIRE_ROLE
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.v1 import cluster_pb2, inference_pb2, worker_pb2
from tandem.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from worker.wire import PROTOCOL_VERSION, expanded_frame

TOTAL_BLOCKS = 64
BLOCK_TOKENS = 16
BLOCK_BYTES = 1024
REPORT_S = 0.2
RECEIVED = worker_pb2.ReceiveStages(
    reserved_s=0.001, linked_s=0.002, first_piece_s=0.003, last_piece_s=0.005, verified_s=0.006, first_token_s=0.006,
    joined_s=0.007,
)  # fmt: skip
SENT = worker_pb2.SendStages(
    opened_s=0.001, computing_s=0.001, linked_s=0.002, first_piece_s=0.002, last_layer_s=0.004, last_ack_s=0.005,
    first_token_s=0.005, hidden_bytes=BLOCK_BYTES // 2,
)  # fmt: skip

AnswerScript = Callable[[Sequence[int]], Sequence[int]]
Expansion = Callable[[worker_pb2.ExpandImages], ExpandedPrompt | TandemError]


@dataclass(slots=True)
class StubBehaviour:
    """What a stub worker does with requests. Tests may change it while the worker runs."""

    answer: AnswerScript = lambda prompt: list(prompt[:8])  # gives all tokens of the answer to a prompt
    token_delay_s: float = 0.0
    refuse_reservations: int = 0  # this many are refused with kv_exhausted
    fail_handoffs: int = 0  # this many joins end with handoff_failed, cause digest_mismatch
    hold_sent_reports: bool = False  # the prefill worker's reports of its side wait in `sent_reports`
    fail_decodes: int = 0  # this many answers end with worker_lost after one token of this worker
    talk_after_failure: bool = False  # keep sending tokens of a failed request
    hold_prefills: bool = False  # never answer Prefill and Generate
    cached_tokens: int = 0
    logprob: float = -0.5
    reports_steps: bool = True  # send the load several times per second while there are requests, as real workers do
    is_stuck: bool = False  # accept connections and frames, and send nothing
    fail_canaries: bool = False
    # By number of an answer's token, from 0: proposed, accepted, whether from the prediction. Of all requests.
    proposals: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    takes_more: bool = True  # accept several frames per message; older workers do not


def script(tokens: Sequence[int]) -> AnswerScript:
    """Answers any prompt with `tokens`; if the prompt already ends with the first of them, with the rest."""

    def answer(prompt: Sequence[int]) -> Sequence[int]:
        known = next(n for n in range(len(tokens), -1, -1) if list(prompt[len(prompt) - n :]) == list(tokens[:n]))
        return tokens[known:]

    return answer


@dataclass(slots=True)
class _Session:
    out: asyncio.Queue[worker_pb2.WorkerFrame] = field(default_factory=asyncio.Queue)
    works: dict[str, worker_pb2.Work] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)


class StubWorker(WorkerServicer):
    """One epoch of a worker. `received` and `cancelled` record the router's frames by wire id."""

    def __init__(
        self, worker_id: str, role: Role, model: str, *, epoch: int = 1, total_blocks: int = TOTAL_BLOCKS
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.model = model
        self.epoch = epoch
        self.total_blocks = total_blocks
        self.host_blocks = worker_pb2.HostBlocks()
        self.behaviour = StubBehaviour()
        self.received: list[tuple[str, str]] = []  # (frame, wire id)
        self.works: dict[str, worker_pb2.Work] = {}
        self.cancelled: set[str] = set()
        self.expands: Expansion | None = None  # None: it takes no images
        self.expansions: list[worker_pb2.ExpandImages] = []
        self.canaries: list[str] = []  # kinds of the canaries' frames; the other lists have none of them
        self.sent_reports: list[Callable[[], None]] = []  # held; a call sends one
        self.messages = 0  # from routers; each holds one or more frames
        self.steps = 0
        self.meters = worker_pb2.WorkerMeters()  # sent with the hello
        self.adapters = worker_pb2.Adapters()  # likewise
        self.known: set[str] = set()  # unfinished requests
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._port = 0

    async def start(self) -> None:
        add_WorkerServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def kill(self) -> None:
        """Ends the worker and all its requests at once."""
        await self._server.stop(None)

    def info(self) -> cluster_pb2.WorkerInfo:
        info = cluster_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            model=self.model,
            role=WIRE_ROLE[self.role],
            address=f"127.0.0.1:{self._port}",
            total_blocks=self.total_blocks,
            layout=cluster_pb2.KvLayout(block_tokens=16),
        )
        if self.expands is not None:
            info.can.names.extend(each.value for each in Capability)
        return info

    def frames(self, kind: str) -> list[str]:
        """Wire ids of the received frames of one kind, in order."""
        return [wire_id for frame, wire_id in self.received if frame == kind]

    async def GetState(self, request: worker_pb2.GetStateRequest, context: Any) -> worker_pb2.WorkerState:
        return worker_pb2.WorkerState(worker_id=self.worker_id, epoch=self.epoch, load=self._load())

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.RouterFrame], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        session = _Session()
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            hello = worker_pb2.WorkerHello(
                worker_id=self.worker_id,
                epoch=self.epoch,
                protocol=PROTOCOL_VERSION,
                takes_more=self.behaviour.takes_more,
            )
            yield worker_pb2.WorkerFrame(hello=hello, load=self._load(), meters=self.meters, adapters=self.adapters)
            while True:
                frame = await self._next(session)
                while self.behaviour.is_stuck:  # noqa: ASYNC110  # tests set it without an event
                    await asyncio.sleep(REPORT_S)
                frame.sent_at_s = time.monotonic()
                yield frame
        finally:
            reader.cancel()
            for task in session.tasks.values():
                task.cancel()

    async def _next(self, session: _Session) -> worker_pb2.WorkerFrame:
        while True:
            try:
                async with asyncio.timeout(REPORT_S if self.behaviour.reports_steps else None):
                    return await session.out.get()
            except TimeoutError:
                if self.known:
                    self.steps += 1
                    return worker_pb2.WorkerFrame(load=self._load())

    async def _read(self, session: _Session, frames: AsyncIterator[worker_pb2.RouterFrame]) -> None:
        async for message in frames:
            self.messages += 1
            for frame in (message, *message.more):
                self._on_frame(session, frame)

    def _on_frame(self, session: _Session, frame: worker_pb2.RouterFrame) -> None:
        if is_canary(frame):
            self._on_canary(session, frame)
            return
        match frame.WhichOneof("frame"):
            case "reserve":
                self._on_reserve(session, frame.reserve.work)
            case "prefill":
                self._on_work(session, "prefill", frame.prefill.work)
            case "generate":
                self._on_work(session, "generate", frame.generate.work)
            case "join":
                self.received.append(("join", frame.join.request_id))
                self._spawn(session, frame.join.request_id, self._join(session, frame.join.request_id))
            case "cancel":
                self._on_cancel(session, frame.cancel.request_id)
            case "expand_images" if self.expands is not None:
                asked = frame.expand_images
                self.expansions.append(asked)
                expanded = expanded_frame(asked.request_id, self.expands(asked))
                session.out.put_nowait(worker_pb2.WorkerFrame(expanded=[expanded]))
            case _:
                pass

    def _on_canary(self, session: _Session, frame: worker_pb2.RouterFrame) -> None:
        if (answer := canary_answer(frame)) is None:
            return
        self.canaries.append(str(frame.WhichOneof("frame")))
        if self.behaviour.fail_canaries:
            self._error(session, wire_id(frame), ErrorCode.HANDOFF_FAILED, HandoffCause.TRANSPORT)
        else:
            session.out.put_nowait(answer)

    def _on_reserve(self, session: _Session, work: worker_pb2.Work) -> None:
        wire_id = work.request_id
        self._note("reserve", work)
        if self.behaviour.refuse_reservations > 0:
            self.behaviour.refuse_reservations -= 1
            self._error(session, wire_id, ErrorCode.KV_EXHAUSTED)
        else:
            session.works[wire_id] = work
            ticket = worker_pb2.HandoffTicket(
                signed=b"stub",
                decode_worker=self.worker_id,
                decode_epoch=self.epoch,
                cached_tokens=self.behaviour.cached_tokens,
            )
            session.out.put_nowait(
                worker_pb2.WorkerFrame(reserved=[worker_pb2.Reserved(request_id=wire_id, ticket=ticket)])
            )

    def _on_work(self, session: _Session, kind: str, work: worker_pb2.Work) -> None:
        self._note(kind, work)
        if self.behaviour.hold_prefills:
            return
        job = self._prefill(session, work) if kind == "prefill" else self._generate(session, work)
        self._spawn(session, work.request_id, job)

    def _on_cancel(self, session: _Session, wire_id: str) -> None:
        self.received.append(("cancel", wire_id))
        self.cancelled.add(wire_id)
        if wire_id in self.known:
            if (task := session.tasks.pop(wire_id, None)) is not None:
                task.cancel()
            self._error(session, wire_id, ErrorCode.CANCELLED)

    async def _prefill(self, session: _Session, work: worker_pb2.Work) -> None:
        wire_id = work.request_id
        tokens = self._answer(work)
        computing_at_s = await self._compute()
        frame = worker_pb2.WorkerFrame(tokens=[self._token(work, tokens[0], computing_at_s)])
        self._score_prompt(frame, work)
        ended = self._end_reason(work, tokens, 1)
        if ended is not None:
            frame.ended.append(worker_pb2.Ended(request_id=wire_id, finish_reason=ended))
        else:
            blocks = blocks_for(len(work.prompt), BLOCK_TOKENS)
            sent = worker_pb2.HandoffDone(
                request_id=wire_id,
                bytes=blocks * BLOCK_BYTES,
                pieces=blocks,
                anchor_at_s=time.monotonic(),
                sent=SENT,
            )
            if self.behaviour.hold_sent_reports:
                report = worker_pb2.WorkerFrame(handoffs=[sent])
                self.sent_reports.append(partial(session.out.put_nowait, report))
            else:
                frame.handoffs.append(sent)
        self.known.discard(wire_id)
        session.out.put_nowait(frame)

    async def _generate(self, session: _Session, work: worker_pb2.Work) -> None:
        await self._stream(session, work, 0)

    async def _join(self, session: _Session, wire_id: str) -> None:
        work = session.works[wire_id]
        if self.behaviour.fail_handoffs > 0:
            self.behaviour.fail_handoffs -= 1
            self._error(session, wire_id, ErrorCode.HANDOFF_FAILED, HandoffCause.DIGEST_MISMATCH)
            if self.behaviour.talk_after_failure:
                await self._stream(session, work, 1)
            return
        blocks = blocks_for(len(work.prompt) - self.behaviour.cached_tokens, BLOCK_TOKENS)
        done = worker_pb2.HandoffDone(
            request_id=wire_id,
            bytes=blocks * BLOCK_BYTES,
            blocks=blocks,
            pieces=blocks,
            anchor_at_s=time.monotonic(),
            received=RECEIVED,
        )
        session.out.put_nowait(worker_pb2.WorkerFrame(handoffs=[done]))
        await self._stream(session, work, 1)

    async def _stream(self, session: _Session, work: worker_pb2.Work, start: int) -> None:
        tokens = self._answer(work)
        for count in range(start + 1, len(tokens) + 1):
            computing_at_s = None
            if count == 1:
                computing_at_s = await self._compute()
            else:
                await asyncio.sleep(self.behaviour.token_delay_s)
            token = self._token(work, tokens[count - 1], computing_at_s)
            proposals = self.behaviour.proposals.get(work.answer_tokens + count - 1, (0, 0, False))
            token.proposed_tokens, token.accepted_tokens, token.from_prediction = proposals
            frame = worker_pb2.WorkerFrame(tokens=[token])
            if count == 1:
                self._score_prompt(frame, work)
            if self.behaviour.fail_decodes > 0:
                self.behaviour.fail_decodes -= 1
                session.out.put_nowait(frame)
                self._error(session, work.request_id, ErrorCode.WORKER_LOST)
                return
            ended = self._end_reason(work, tokens, count)
            if ended is not None:
                self.known.discard(work.request_id)
                frame.ended.append(worker_pb2.Ended(request_id=work.request_id, finish_reason=ended))
                frame.load.CopyFrom(self._load())
            session.out.put_nowait(frame)
            if ended is not None:
                return

    async def _compute(self) -> float:
        """Waits as if computing a prompt. Returns when the computation began."""
        start_s = time.monotonic()
        await asyncio.sleep(self.behaviour.token_delay_s)
        return start_s

    def _answer(self, work: worker_pb2.Work) -> list[int]:
        return list(self.behaviour.answer(list(work.prompt)))[: work.sampling.max_tokens]

    def _end_reason(
        self, work: worker_pb2.Work, tokens: Sequence[int], count: int
    ) -> inference_pb2.FinishReason.ValueType | None:
        if tokens[count - 1] in work.sampling.stop_token_ids:
            return inference_pb2.FINISH_REASON_STOP
        return inference_pb2.FINISH_REASON_LENGTH if count == len(tokens) else None

    def _token(self, work: worker_pb2.Work, token_id: int, computing_at_s: float | None) -> worker_pb2.StepToken:
        """One token of an answer. `computing_at_s`: start of the prompt's computation; None after the first token."""
        token = worker_pb2.StepToken(request_id=work.request_id, token_id=token_id)
        if computing_at_s is not None:
            token.cached_tokens = self.behaviour.cached_tokens
            token.computing_at_s, token.sampled_at_s = computing_at_s, time.monotonic()
        if work.sampling.HasField("logprobs"):
            token.logprobs.token_id = token_id
            token.logprobs.logprob = self.behaviour.logprob
            for rank in range(work.sampling.logprobs):
                token.logprobs.top.add(token_id=token_id + rank, logprob=self.behaviour.logprob - rank)
        return token

    def _score_prompt(self, frame: worker_pb2.WorkerFrame, work: worker_pb2.Work) -> None:
        if not work.sampling.HasField("prompt_logprobs"):
            return
        scores = frame.prompt_scores.add(request_id=work.request_id, start=1)
        for token_id in work.prompt[1:]:
            token = scores.tokens.add(token_id=token_id, logprob=self.behaviour.logprob)
            for rank in range(work.sampling.prompt_logprobs):
                token.top.add(token_id=token_id + rank, logprob=self.behaviour.logprob - rank)

    def _error(self, session: _Session, wire_id: str, code: ErrorCode, cause: HandoffCause | None = None) -> None:
        self.known.discard(wire_id)
        error = worker_pb2.WorkerError(code=code.value, message=f"stub: {code.value}", cause=cause)
        session.out.put_nowait(worker_pb2.WorkerFrame(ended=[worker_pb2.Ended(request_id=wire_id, error=error)]))

    def _note(self, kind: str, work: worker_pb2.Work) -> None:
        self.received.append((kind, work.request_id))
        self.works[work.request_id] = work
        self.known.add(work.request_id)

    def _spawn(self, session: _Session, wire_id: str, job: Any) -> None:
        session.tasks[wire_id] = asyncio.create_task(job)

    def _load(self) -> worker_pb2.WorkerLoad:
        free = self.total_blocks - len(self.known)
        blocks = worker_pb2.BlockCounts(free=free, in_use=len(self.known), total=self.total_blocks)
        steps = self.steps if self.behaviour.reports_steps else None
        return worker_pb2.WorkerLoad(
            running_requests=len(self.known), blocks=blocks, steps=steps, host_blocks=self.host_blocks
        )


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits until the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the state has no event
            await asyncio.sleep(0.005)
