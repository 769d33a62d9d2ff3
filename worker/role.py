"""What a role adds to the leader's loop. A worker runs one role; both are made of the same parts."""

from __future__ import annotations

from typing import Protocol

from kvtransfer.control import FromAgent
from tandem.engine.api import StepResult
from tandem.v1 import worker_pb2


class Role(Protocol):
    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """One frame from a router. Raises TandemError when it is refused."""
        ...

    def on_session_closed(self, session: int) -> None:
        """The router is gone: everything it asked for ends."""
        ...

    def on_agent(self, rank: int, message: FromAgent) -> None: ...

    def on_agent_lost(self, rank: int) -> None:
        """The transfer agent beside `rank` died. It writes and reads nothing any more."""
        ...

    def after_step(self, result: StepResult) -> None: ...

    def tick(self) -> None:
        """Called at least once a second: deadlines."""
        ...
