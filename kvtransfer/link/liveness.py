"""When a link is given up: both ends beat, so silence means a peer that stopped; and pieces must move.

A stopped process, a lost host and a hung communicator look alike from here: nothing happens for `STALL_S`. Then the
link ends, its handoffs fail as `peer_lost`, and the sending end makes it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.connection.stream import FrameStream
from kvtransfer.session.piece import FrameType, Header
from kvtransfer.transports.protocol import STALL_S as STALL_S
from kvtransfer.versions import has_heartbeats
from tandem.clock import Clock, SystemClock

HEARTBEAT_S = 0.5


class LinkWatch:
    """One end of a ready link.

    Args:
        is_moving: a piece is on its way or being written; then only `moved` counts, else `heard` does too.
    """

    def __init__(self, is_moving: Callable[[], bool], clock: Clock | None = None) -> None:
        self._is_moving = is_moving
        self._clock = clock or SystemClock()
        self._last_s = self._clock.now_s()

    def heard(self) -> None:
        """Something arrived; a peer that beats while its pieces do not move is no better than a silent one."""
        if not self._is_moving():
            self.moved()

    def moved(self) -> None:
        """A piece was moved or answered, or is the first to be on its way."""
        self._last_s = self._clock.now_s()

    async def run(self, stream: FrameStream) -> NoReturn:
        """Beats until the link stalls.

        Raises:
            HandoffFault: (peer_lost)
        """
        self.moved()
        while True:
            if has_heartbeats(stream.version):
                stream.send(Header(FrameType.HEARTBEAT))
            else:
                self.heard()  # an older peer is silent when it has nothing to say
            began_s = self._clock.now_s()
            await asyncio.sleep(HEARTBEAT_S)
            self.check(self._clock.now_s() - began_s)

    def check(self, slept_s: float) -> None:
        """Raises HandoffFault (peer_lost): the link has stalled. `slept_s`: since the check before."""
        if slept_s > 2 * HEARTBEAT_S:
            self._last_s += slept_s  # it was us who did not run: what came meanwhile is not read yet
        if self._clock.now_s() - self._last_s > STALL_S:
            what = "no piece moved" if self._is_moving() else "no sign of life"
            raise HandoffFault(HandoffCause.PEER_LOST, f"{what} for {STALL_S:g} s")
