"""Detects stalled links: both ends send heartbeats, and pieces must make progress.

A stopped process, a lost host and a hung communicator look the same: no progress for `STALL_S`. Then the link ends, its
handoffs fail as `peer_lost`, and the sending end reconnects.

A piece that waits for the staging or the threads of an agent may wait longer. Heartbeats say so (`seq` 1; earlier
releases send 0 and ignore it), and then they are progress enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.connection.stream import FrameStream
from kvtransfer.session.piece import FrameType, Header
from kvtransfer.transports.protocol import STALL_S
from kvtransfer.versions import has_heartbeats
from tandem.clock import Clock, SystemClock

HEARTBEAT_S = 0.5


class LinkWatch:
    """One end of a ready link.

    Args:
        is_moving: whether a piece is in flight or being written. Then only `moved` counts as progress, otherwise
            `heard` does too.
        is_held_up: whether a piece waits for this agent. Then `heard` is progress.
        hears: whether this end reads frames. If not, the peer's silence means nothing while a piece is held up.
    """

    def __init__(
        self,
        is_moving: Callable[[], bool],
        clock: Clock | None = None,
        *,
        is_held_up: Callable[[], bool] = lambda: False,
        hears: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_moving = is_moving
        self._is_held_up = is_held_up
        self._hears = hears
        self._clock = clock or SystemClock()
        self._last_s = self._clock.now_s()

    def heard(self, *, is_peer_held_up: bool = False) -> None:
        """A frame arrived. Heartbeats do not count as progress while pieces do not move and could."""
        if is_peer_held_up or self._is_held_up() or not self._is_moving():
            self.moved()

    def moved(self) -> None:
        """A piece was moved or acknowledged, or became the first one in flight."""
        self._last_s = self._clock.now_s()

    async def run(self, stream: FrameStream) -> NoReturn:
        """Sends heartbeats until the link stalls.

        Raises:
            HandoffFault: (peer_lost)
        """
        self.moved()
        while True:
            if has_heartbeats(stream.version):
                stream.send(Header(FrameType.HEARTBEAT, seq=int(self._is_held_up())))
            if not has_heartbeats(stream.version) or not self._hears():
                self.heard()
            began_s = self._clock.now_s()
            await asyncio.sleep(HEARTBEAT_S)
            self.check(self._clock.now_s() - began_s)

    def check(self, slept_s: float) -> None:
        """Raises HandoffFault (peer_lost) if the link has stalled. `slept_s` is the time since the previous check."""
        if slept_s > 2 * HEARTBEAT_S:
            self._last_s += slept_s  # this process was suspended, and frames that arrived meanwhile are unread
        if self._clock.now_s() - self._last_s > STALL_S:
            what = "no piece moved" if self._is_moving() else "no heartbeat"
            raise HandoffFault(HandoffCause.PEER_LOST, f"{what} for {STALL_S:g} s")
