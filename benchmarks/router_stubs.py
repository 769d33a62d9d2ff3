"""Workers without an engine that serve the Worker protocol at a given pace, and their directory, in a separate process.

    python -m benchmarks.router_stubs --model NAME --answer FILE --prefill 2 --decode 4 --step-ms 20 --prefill-ms 5

Prints {"controller": ADDRESS}. For every line of input it prints what it sent since the last line: for each request
when its prompt was taken up and when each token left, on the host's monotonic clock. Exits at the end of its input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import uvloop

from router.testing.controller import StubController
from router.testing.stub_worker import RECEIVED, SENT
from tandem.config.model import Role
from tandem.kvcache.blockhash import BlockHash, HashKey, hash_blocks
from tandem.kvcache.layout import blocks_for
from tandem.kvcache.prefix_events import join_hashes
from tandem.rpc.directory import WIRE_ROLE
from tandem.rpc.grpc_options import SERVER_OPTIONS
from tandem.rpc.wire_format import message_field
from tandem.v1 import cluster_pb2, inference_pb2, worker_pb2
from worker.event_publisher import EventPublisher
from worker.waiting_frames import messages
from worker.wire import PROTOCOL_VERSION

SERVICE = "tandem.v1.Worker"
CLUSTER = "bench"
FINGERPRINT = "bench"
BLOCK_TOKENS = 16
BLOCK_BYTES = 9 << 10
TOTAL_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class StubPace:
    step_s: float  # a decode step: one token for each request
    prefill_s: float  # from a prompt's arrival to its first token
    prefill_tokens_per_s: float | None = None  # replaces prefill_s: prompts one after the other, cached tokens free


@dataclass(slots=True)
class _Running:
    """A request in the decode batch."""

    session: _RouterSession
    work: worker_pb2.Work
    given: int  # tokens sent
    kept: int  # tokens with KV


@dataclass(slots=True, eq=False)
class _RouterSession:
    out: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    reserved: dict[str, worker_pb2.Work] = field(default_factory=dict)
    frames_seen: int = 0  # without hello


@dataclass(slots=True)
class SentTokens:
    """Times of one request on this worker."""

    taken_s: float
    cached_tokens: int = 0
    tokens_s: list[float] = field(default_factory=list)


class PrefixCache:
    """The prefix cache of a worker, without eviction."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._held: set[BlockHash] = set()

    def take(self, prompt: Sequence[int]) -> tuple[int, list[BlockHash]]:
        """Returns the cached tokens of a prompt, and the blocks to publish when it is computed."""
        hashes = hash_blocks(prompt, BLOCK_TOKENS, HashKey(FINGERPRINT))
        known = next((at for at, each in enumerate(hashes) if each not in self._held), len(hashes))
        self._held.update(hashes)
        return min(known * BLOCK_TOKENS, len(prompt) - 1), hashes[known:]

    def computed(self, blocks: Sequence[BlockHash]) -> None:
        if blocks:
            self._publisher.publish(True, join_hashes(blocks))


class PacedWorker:
    """Answers with the tokens of `answer`, repeated up to the request's limit. Reports its load when it changed, like
    real workers, and replies to frames between steps at once."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        model: str,
        pace: StubPace,
        answer: Sequence[int],
        cache: PrefixCache | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self._model = model
        self._pace = pace
        self._answer = answer
        self._cache = cache
        self._free_at_s = 0.0  # when the prompts there are will have been computed
        self.sent: dict[str, SentTokens] = {}
        self._running: dict[str, _Running] = {}
        self._prefilling: dict[str, asyncio.TimerHandle] = {}
        self._sessions: set[_RouterSession] = set()
        self._sent_load: worker_pb2.WorkerLoad | None = None
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._port = 0

    async def start(self) -> None:
        session: grpc.RpcMethodHandler[worker_pb2.RouterFrame, bytes] = grpc.stream_stream_rpc_method_handler(
            self._session, worker_pb2.RouterFrame.FromString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": session}),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    def info(self) -> cluster_pb2.WorkerInfo:
        return cluster_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=1,
            model=self._model,
            role=WIRE_ROLE[self.role],
            address=f"127.0.0.1:{self._port}",
            total_blocks=TOTAL_BLOCKS,
        )

    async def _session(self, frames: AsyncIterator[worker_pb2.RouterFrame], context: Any) -> AsyncIterator[bytes]:
        session = _RouterSession()
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(session, frames))
        try:
            hello = worker_pb2.WorkerHello(
                worker_id=self.worker_id, epoch=1, protocol=PROTOCOL_VERSION, takes_more=True
            )
            yield worker_pb2.WorkerFrame(hello=hello, load=self._load()).SerializeToString()
            async for message in messages(session.out, takes_more=True):
                yield message
        finally:
            reader.cancel()
            self._sessions.discard(session)
            for wire_id in [each for each, run in self._running.items() if run.session is session]:
                del self._running[wire_id]

    async def steps(self, offset_s: float) -> None:
        """Runs decode steps at fixed times, independent of how long each takes. Never returns."""
        due_s = time.monotonic() + offset_s
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s += self._pace.step_s
            self._step()

    def _step(self) -> None:
        frames: dict[_RouterSession, worker_pb2.WorkerFrame] = {}
        now_s = time.monotonic()
        ended = []
        for wire_id, run in self._running.items():
            if (frame := frames.get(run.session)) is None:
                frame = frames[run.session] = worker_pb2.WorkerFrame()
            token = frame.tokens.add(request_id=wire_id, token_id=self._answer[run.given % len(self._answer)])
            if run.work.sampling.HasField("logprobs"):
                token.logprobs.CopyFrom(_scored(token.token_id, run.work.sampling.logprobs))
            self.sent[wire_id].tokens_s.append(now_s)
            run.given += 1
            run.kept += 1
            if run.given >= run.work.sampling.max_tokens:
                frame.ended.add(request_id=wire_id, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
                ended.append(wire_id)
        for wire_id in ended:
            del self._running[wire_id]
        self._flush(frames)

    async def _read(self, session: _RouterSession, frames: AsyncIterator[worker_pb2.RouterFrame]) -> None:
        async for message in frames:
            answer = worker_pb2.WorkerFrame()
            for frame in (message, *message.more):
                session.frames_seen += frame.WhichOneof("frame") != "hello"
                self._on_frame(session, frame, answer)
            self._flush({session: answer} if answer.ByteSize() else {})

    def _on_frame(self, session: _RouterSession, frame: worker_pb2.RouterFrame, answer: worker_pb2.WorkerFrame) -> None:
        match frame.WhichOneof("frame"):
            case "reserve":
                self._on_reserve(session, frame.reserve.work, answer)
            case "prefill":
                self._begin(session, frame.prefill.work)
            case "generate":
                self._begin(session, frame.generate.work)
            case "join":
                self._on_join(session, frame.join.request_id, answer)
            case "cancel":
                self._on_cancel(session, frame.cancel.request_id, answer)
            case _:
                pass

    def _on_reserve(self, session: _RouterSession, work: worker_pb2.Work, answer: worker_pb2.WorkerFrame) -> None:
        session.reserved[work.request_id] = work
        ticket = worker_pb2.HandoffTicket(signed=bytes(96), decode_worker=self.worker_id, decode_epoch=1)
        answer.reserved.add(request_id=work.request_id, ticket=ticket)

    def _begin(self, session: _RouterSession, work: worker_pb2.Work) -> None:
        now_s = time.monotonic()
        sent = self.sent[work.request_id] = SentTokens(now_s)
        fresh: list[BlockHash] = []
        done_s = now_s + self._pace.prefill_s
        if self._cache is not None and self._pace.prefill_tokens_per_s is not None:
            sent.cached_tokens, fresh = self._cache.take(work.prompt)
            took_s = (len(work.prompt) - sent.cached_tokens) / self._pace.prefill_tokens_per_s
            done_s = self._free_at_s = max(now_s, self._free_at_s) + took_s
        loop = asyncio.get_running_loop()
        timer = loop.call_later(done_s - now_s, self._prefilled, session, work, fresh)
        self._prefilling[work.request_id] = timer

    def _prefilled(self, session: _RouterSession, work: worker_pb2.Work, fresh: Sequence[BlockHash]) -> None:
        wire_id = work.request_id
        del self._prefilling[wire_id]
        if self._cache is not None:
            self._cache.computed(fresh)
        sent, now_s = self.sent[wire_id], time.monotonic()
        sent.tokens_s.append(now_s)
        first = worker_pb2.StepToken(
            request_id=wire_id,
            token_id=self._answer[0],
            cached_tokens=sent.cached_tokens,
            computing_at_s=sent.taken_s,
            sampled_at_s=now_s,
        )
        if work.sampling.HasField("logprobs"):
            first.logprobs.CopyFrom(_scored(first.token_id, work.sampling.logprobs))
        frame, scores = worker_pb2.WorkerFrame(tokens=[first]), b""
        if work.sampling.HasField("prompt_logprobs"):
            scores = _scores_of(wire_id, tuple(work.prompt), work.sampling.prompt_logprobs)
        if self.role is Role.PREFILL:
            frame.handoffs.append(self._done(work, worker_pb2.HandoffDone(sent=SENT)))
        elif work.sampling.max_tokens > 1:
            self._running[wire_id] = _Running(session, work, 1, len(work.prompt))
        else:
            frame.ended.add(request_id=wire_id, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
        self._flush({session: frame}, {session: scores})

    def _on_join(self, session: _RouterSession, wire_id: str, answer: worker_pb2.WorkerFrame) -> None:
        work = session.reserved.pop(wire_id, None)
        if work is None:
            return
        self.sent[wire_id] = SentTokens(time.monotonic())
        self._running[wire_id] = _Running(session, work, 1, len(work.prompt))
        answer.handoffs.append(self._done(work, worker_pb2.HandoffDone(received=RECEIVED)))

    def _on_cancel(self, session: _RouterSession, wire_id: str, answer: worker_pb2.WorkerFrame) -> None:
        timer, run = self._prefilling.pop(wire_id, None), self._running.pop(wire_id, None)
        if timer is not None:
            timer.cancel()
        if timer is None and run is None and session.reserved.pop(wire_id, None) is None:
            return
        error = worker_pb2.WorkerError(code="cancelled", message="cancelled")
        answer.ended.add(request_id=wire_id, error=error)

    def _done(self, work: worker_pb2.Work, done: worker_pb2.HandoffDone) -> worker_pb2.HandoffDone:
        done.request_id = work.request_id
        done.blocks = done.pieces = blocks_for(len(work.prompt), BLOCK_TOKENS)
        done.bytes = done.blocks * BLOCK_BYTES
        done.anchor_at_s = time.monotonic() - self._pace.prefill_s
        return done

    def _flush(
        self,
        frames: dict[_RouterSession, worker_pb2.WorkerFrame],
        scores: Mapping[_RouterSession, bytes] | None = None,
    ) -> None:
        """Sends the frames with their serialized scores, and the load to every session if it changed."""
        load, scores = self._load(), scores or {}
        if load != self._sent_load:
            self._sent_load = load
            for session in self._sessions:
                if (frame := frames.get(session)) is None:
                    frame = frames[session] = worker_pb2.WorkerFrame()
                frame.load.CopyFrom(load)
        for session, frame in frames.items():
            frame.frames_seen, frame.sent_at_s = session.frames_seen, time.monotonic()
            session.out.put_nowait(frame.SerializeToString() + scores.get(session, b""))

    def _load(self) -> worker_pb2.WorkerLoad:
        used = sum(blocks_for(run.kept, BLOCK_TOKENS) for run in self._running.values())
        waiting_s = max(0.0, self._free_at_s - time.monotonic())
        return worker_pb2.WorkerLoad(
            running_requests=len(self._running),
            waiting_requests=len(self._prefilling),
            waiting_tokens=round(waiting_s * (self._pace.prefill_tokens_per_s or 0.0)),
            blocks=worker_pb2.BlockCounts(free=TOTAL_BLOCKS - used, in_use=used, total=TOTAL_BLOCKS),
        )


def _scores_of(wire_id: str, prompt: tuple[int, ...], count: int) -> bytes:
    """To be appended to a serialized frame."""
    scores = worker_pb2.PromptScores(request_id=wire_id).SerializeToString() + _scores(prompt, count)
    return message_field(worker_pb2.WorkerFrame.PROMPT_SCORES_FIELD_NUMBER, scores)


@lru_cache(maxsize=64)
def _scores(prompt: tuple[int, ...], count: int) -> bytes:
    """Without the request's id. Kept too: real workers do not score in the process of those that decode."""
    tokens = [_scored(each, count) for each in prompt[1:]]
    return worker_pb2.PromptScores(start=1, tokens=tokens).SerializeToString()


@lru_cache(maxsize=4096)
def _scored(token_id: int, count: int) -> inference_pb2.TokenLogprobs:
    """A token with the logprobs of `count` others. Kept: to make them would delay the workers' other answers."""
    top = [inference_pb2.TopLogprob(token_id=3 + each, logprob=-each / 3) for each in range(count)]
    return inference_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, top=top)


async def serve(options: argparse.Namespace) -> None:
    answer = json.loads(options.answer.read_text())
    pace = StubPace(options.step_ms / 1000, options.prefill_ms / 1000, options.prefill_tokens_per_s)
    names = [(Role.PREFILL, f"p{number}") for number in range(options.prefill)]
    names += [(Role.DECODE, f"d{number}") for number in range(options.decode)]
    publishers = {name: _publisher(name, options.redis) for _, name in names} if options.redis else {}
    caches = {name: PrefixCache(publisher) for name, publisher in publishers.items()}
    workers = [PacedWorker(name, role, options.model, pace, answer, caches.get(name)) for role, name in names]
    controller = StubController()
    await controller.start()
    decoders = [worker for worker in workers if worker.role is Role.DECODE]
    for worker in workers:
        await worker.start()
    # Staggers the steps, which are not synchronized between real workers.
    steps = [asyncio.create_task(each.steps(at * pace.step_s / len(decoders))) for at, each in enumerate(decoders)]
    steps += [asyncio.create_task(publisher.run()) for publisher in publishers.values()]
    await controller.set_infos([worker.info() for worker in workers])
    print(json.dumps({"controller": controller.address}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(_log(workers)), flush=True)
    for task in steps:
        task.cancel()


def _publisher(worker_id: str, redis_url: str) -> EventPublisher:
    return EventPublisher(cluster=CLUSTER, worker_id=worker_id, epoch=1, redis_url=redis_url)


def _log(workers: Sequence[PacedWorker]) -> dict[str, dict[str, Any]]:
    """By request, all attempts together: when its prompt was taken up, and its tokens' times in order."""
    log: dict[str, dict[str, Any]] = {}
    for worker in workers:  # prefill workers first
        for wire_id, sent in worker.sent.items():
            fresh = {"taken_s": sent.taken_s, "cached_tokens": sent.cached_tokens, "tokens_s": []}
            entry = log.setdefault(wire_id.rpartition(".")[0], fresh)
            entry["tokens_s"] += sent.tokens_s
        worker.sent.clear()
    return log


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--answer", type=Path, required=True, help="a JSON list of token ids")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--prefill-ms", type=float, default=5)
    parser.add_argument("--prefill-tokens-per-s", type=float, help="prefill rate of a worker; needs --redis")
    parser.add_argument("--redis", help="URL of a Redis to which workers publish the prefixes that they cache")
    uvloop.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
