"""When a busy router writes: what arrives for a stream in between is one write, which lets the router catch up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Stream = TypeVar("Stream")
LOAD_INTERVAL_S = 0.5  # how often the load is measured; a shorter peak is no reason to delay tokens
FULL_SHARE = 0.95  # of the time: beyond this, it falls behind unless it writes still less often
BUSY_SHARE = 0.8  # beyond this, hardly a core is left to catch up with
CALM_SHARE = 0.7  # it would be below this without pauses: it needs none
IDLE_SHARE = 0.3  # below this with pauses, its tokens cost far less now than before them
FEW_TOKENS_PER_S = 1000  # so few cost little to write: something else keeps the router busy, and pauses do not help
PAUSE_S = 0.025  # the first pause, and by how much it changes at each measurement
MAX_PAUSE_S = 0.075
AT_ONCE = 16  # streams; then other events have their turn, such as new requests and their first tokens


class WritePauses:
    """Pauses grow while the router is busy, and end when it would not be busy without them.

    Pauses themselves about halve its work, so how busy it would be is told from what the tokens cost before the pauses.

    Args: `busy_s`: CPU seconds of the event loop's thread.
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, busy_s: Callable[[], float] = time.thread_time
    ) -> None:
        self.pause_s = 0.0  # from a stream's next token to the write that carries it and those after it
        self._now_s = now_s
        self._busy_s = busy_s
        self._measured_s, self._busy_then_s = now_s(), busy_s()
        self._tokens = 0  # since then
        self._token_s = 0.0  # CPU of one token, with all that its request costs, when there were no pauses last
        self._paused: list[asyncio.Future[None]] = []  # until the end of the pause under way

    def measure(self, tokens: int = 0) -> None:
        """Measures the load, if it is time. `tokens`: that came to be written since the last call."""
        self._tokens += tokens
        now_s = self._now_s()
        if (passed_s := now_s - self._measured_s) >= LOAD_INTERVAL_S:
            busy_s = self._busy_s()
            share = (busy_s - self._busy_then_s) / passed_s
            tokens_per_s = self._tokens / passed_s
            self._measured_s, self._busy_then_s, self._tokens = now_s, busy_s, 0
            self.pause_s = 0.0 if tokens_per_s < FEW_TOKENS_PER_S else self._next_pause_s(share, tokens_per_s)

    def _next_pause_s(self, share: float, tokens_per_s: float) -> float:
        """`share`: of the time that it was busy."""
        if not self.pause_s:
            self._token_s = share / tokens_per_s
        without_pauses = tokens_per_s * self._token_s
        if share < IDLE_SHARE or without_pauses < (CALM_SHARE if self.pause_s else BUSY_SHARE):
            return 0.0
        longest_s = MAX_PAUSE_S if share >= FULL_SHARE else PAUSE_S
        if self.pause_s > longest_s:
            return max(longest_s, self.pause_s - PAUSE_S)
        return min(longest_s, self.pause_s + PAUSE_S)

    async def pause(self) -> None:
        """Returns when the next pause ends, for all streams together: their writes then cost less than one by one."""
        loop = asyncio.get_running_loop()
        if not self._paused:
            loop.call_later(self.pause_s, self._end)
        self._paused.append(ended := loop.create_future())
        await ended

    def _end(self) -> None:
        paused, self._paused = self._paused, []
        for_each_in_turns(paused, set_done)


def for_each_in_turns(streams: list[Stream], do: Callable[[Stream], None]) -> None:
    """Calls `do` for each, AT_ONCE of them now."""
    for stream in streams[:AT_ONCE]:
        do(stream)
    if len(streams) > AT_ONCE:
        asyncio.get_running_loop().call_soon(for_each_in_turns, streams[AT_ONCE:], do)


def set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
