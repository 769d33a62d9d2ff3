"""Streams requests as they end to trace recordings: lengths, times, classes, and which blocks prompts share.

It sends neither text nor tokens. Each recording salts the hashes, so they do not reveal prompts.

Without listeners it does nothing. It bounds the listeners, the queue of each, and the hashes of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from router.observe.trace_store import Traces
from router.requests import actions as act
from router.requests.facts import Facts
from router.requests.state_machine import RequestRun
from tandem.errors import InputError, OverloadedError
from tandem.v1 import trace_pb2

MAX_LISTENERS = 4
MAX_WAITING = 1024  # requests in a listener's queue; further ones are only counted
MAX_BLOCKS = 8192  # of one prompt: later blocks count as unshared
MIN_SALT_BYTES, MAX_SALT_BYTES = 16, 64
_HASH_SHIFT = 2  # a trace's ids have 62 bits


# A request without its hashes, and the blocks to hash. Holds no reference to the prompt or the answer.
_Ended = tuple[trace_pb2.LoggedRequest, Sequence[bytes]]


@dataclass(slots=True, eq=False)
class _Listener:
    model: str
    waiting: asyncio.Queue[_Ended] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    lost: int = 0


class RequestTap:
    """Runs on the event loop's thread."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._listeners: set[_Listener] = set()

    def subscribe(self, facts: Facts) -> None:
        facts.subscribe(act.End, "request_tap", self._ended)

    def _ended(self, run: RequestRun, fact: act.End, now_s: float) -> None:
        if self._listeners:
            self.note(run, self._traces.of(run).received_unix_s)

    def note(self, run: RequestRun, received_unix_s: float) -> None:
        """Offers an ended request to each listener. Never waits."""
        for listener in self._listeners:
            if listener.model not in ("", run.request.model):
                continue
            if listener.waiting.full():
                listener.lost += 1
            else:
                listener.waiting.put_nowait(_logged(run, received_unix_s))

    async def listen(self, salt: bytes, model: str) -> AsyncGenerator[trace_pb2.LoggedRequest, None]:
        """Yields ended requests until closed. `model` empty: all models. Raises InputError, OverloadedError."""
        if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
            raise InputError(
                f"salt: expected {MIN_SALT_BYTES} to {MAX_SALT_BYTES} bytes, got {len(salt)}", field="salt"
            )
        if len(self._listeners) >= MAX_LISTENERS:
            raise OverloadedError(f"expected at most {MAX_LISTENERS} recordings at a time: stop one of them first")
        listener = _Listener(model)
        self._listeners.add(listener)
        try:
            while True:
                logged, blocks = await listener.waiting.get()
                # In a thread: hashing a long prompt takes milliseconds.
                logged.block_hashes.extend(await asyncio.to_thread(_hashes, blocks, salt))
                logged.lost, listener.lost = listener.lost, 0
                yield logged
        finally:
            self._listeners.discard(listener)


def _logged(run: RequestRun, received_unix_s: float) -> _Ended:
    request = run.request
    logged = trace_pb2.LoggedRequest(
        model=request.model,
        received_unix_s=received_unix_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=run.answer_tokens,
        block_tokens=request.block_tokens,
        priority=run.terms.priority,
        tenant=run.terms.tenant,
    )
    if (times_s := run.answer_times_s) is not None:
        first_s, last_s = times_s
        logged.ttft_s, logged.decode_s = first_s - run.received_s, last_s - first_s
    return logged, tuple(request.block_hashes[:MAX_BLOCKS])


def _hashes(blocks: Sequence[bytes], salt: bytes) -> list[int]:
    return [int.from_bytes(blake2b(each, key=salt, digest_size=8).digest()) >> _HASH_SHIFT for each in blocks]
