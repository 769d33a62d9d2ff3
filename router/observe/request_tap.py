"""Requests as they end, for whoever records a trace: lengths, times, classes, and which blocks prompts share.

No text and no token, and hashes under a salt of the recording's own, so that nobody can tell what a prompt was.

Off until somebody listens; then bounded in listeners, in what waits for each of them, and in the hashes of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from router.observe.trace import Traces
from router.requests import actions as act
from router.requests.facts import Facts
from router.requests.run import RequestRun
from tandem.errors import InputError, OverloadedError
from tandem.v1 import trace_pb2

MAX_LISTENERS = 4
MAX_WAITING = 1024  # requests that a listener has not taken; further ones are counted instead
MAX_BLOCKS = 8192  # of one prompt: what comes after them counts as its own
MIN_SALT_BYTES, MAX_SALT_BYTES = 16, 64
_HASH_SHIFT = 2  # a trace's ids have 62 bits


# What is told of a request, but for its hashes, and the blocks that they are of. Its prompt and answer are let go.
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
        """Until it is closed. `model` empty: all. Raises InputError, OverloadedError."""
        if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
            raise InputError(
                f"salt: expected {MIN_SALT_BYTES} to {MAX_SALT_BYTES} bytes, got {len(salt)}", field="salt"
            )
        if len(self._listeners) >= MAX_LISTENERS:
            raise OverloadedError(f"{MAX_LISTENERS} recordings are under way already: end one of them first")
        listener = _Listener(model)
        self._listeners.add(listener)
        try:
            while True:
                logged, blocks = await listener.waiting.get()
                # Not here: the hashes of a long prompt take milliseconds.
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
    return logged, tuple(request.block_hashes[:MAX_BLOCKS])


def _hashes(blocks: Sequence[bytes], salt: bytes) -> list[int]:
    return [int.from_bytes(blake2b(each, key=salt, digest_size=8).digest()) >> _HASH_SHIFT for each in blocks]
