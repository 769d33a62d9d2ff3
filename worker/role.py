"""What a role adds to the leader's loop. A worker is able to play all of them at any time: which one it plays is what
routers ask of it, so that it changes without a pause and keeps weights, pool and prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.control import FromAgent
from tandem.engine.api import RequestEnd
from tandem.errors import TandemError
from tandem.v1 import worker_pb2


class Role(Protocol):
    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """One frame from a router. Raises TandemError when it is refused."""
        ...

    def owns(self, engine_id: str) -> bool:
        """Whether the request is this role's business now."""
        ...

    def cancel(self, engine_id: str, error: TandemError) -> None:
        """Ends a request that it owns."""
        ...

    def on_agent(self, rank: int, message: FromAgent) -> None: ...

    def on_agent_lost(self, rank: int) -> None:
        """The transfer agent beside `rank` died. It writes and reads nothing any more."""
        ...

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        """Requests that it owns left the engine."""
        ...

    def tick(self) -> None:
        """Called at least once a second: deadlines."""
        ...
