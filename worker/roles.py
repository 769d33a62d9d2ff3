"""The roles of a worker: what a role adds to the leader's loop, and which role handles which frame and request.

A worker can play every role at any time. Routers choose the role by what they ask for, so a worker changes its role
without a pause and keeps weights, KV pool and prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvtransfer.control import FromAgent
from tandem.engine.api import RequestEnd
from tandem.errors import InputError, RequestCancelled, RequestFailed, TandemError
from tandem.v1 import worker_pb2
from worker.requests import BUGS, RequestBook

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One epoch of a worker. `ticket_key` signs this epoch's tickets; only the worker's own agents receive it."""

    worker_id: str
    epoch: int
    tp: int
    model_fingerprint: str
    block_tokens: int
    ticket_key: bytes = field(repr=False)


class RoleHandler(Protocol):
    """One role in the leader's loop."""

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """Handles one frame from a router. Raises TandemError when the role refuses it."""
        ...

    def owns(self, engine_id: str) -> bool:
        """Whether this role handles the request at present."""
        ...

    def request_of(self, ticket_id: str) -> str | None:
        """The engine id of a handoff's request, if this role has it."""
        ...

    def cancel(self, engine_id: str, error: TandemError) -> None:
        """Ends a request that this role owns."""
        ...

    def on_agent(self, rank: int, message: FromAgent) -> None: ...

    def on_agent_lost(self, rank: int) -> None:
        """The transfer agent beside `rank` died. It reads and writes nothing any more."""
        ...

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        """Requests that this role owns left the engine."""
        ...

    def tick(self) -> None:
        """Called at least once a second, for deadlines."""
        ...


class RoleSet:
    """Dispatches frames by their kind, and everything about a request to the role that owns it.

    Args:
        roles: in the order in which `owns` is called. The last one owns every request that no other role owns.
        by_frame: the role that handles each kind of router frame.
    """

    def __init__(
        self, requests: RequestBook, roles: Sequence[RoleHandler], by_frame: Mapping[str, RoleHandler]
    ) -> None:
        self._requests = requests
        self._roles = tuple(roles)
        self._by_frame = by_frame

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """Raises TandemError when the frame is refused."""
        kind = frame.WhichOneof("frame") or ""
        if kind == "cancel":
            self.end(session, frame.cancel.request_id, RequestCancelled("the router cancelled the request"))
        elif kind in self._by_frame:
            self._by_frame[kind].on_frame(session, frame)
        else:
            raise InputError(f"frame: expected one of cancel, {', '.join(self._by_frame)}, got {kind or 'none'}")

    def end(self, session: int, request_id: str, error: TandemError) -> bool:
        """Ends a live request with `error`. Returns False if there is none of this id."""
        if (engine_id := self._requests.find(session, request_id)) is None:
            return False
        self._owner(engine_id).cancel(engine_id, error)
        return True

    def on_session_closed(self, session: int) -> None:
        for engine_id in self._requests.of_session(session):
            self._owner(engine_id).cancel(engine_id, RequestCancelled("the router's session ended"))

    def on_agent(self, rank: int, message: FromAgent) -> None:
        for role in self._roles:
            try:
                role.on_agent(rank, message)
            except BUGS as error:
                log.exception("a transfer agent's message could not be handled", extra={"rank": rank})
                if engine_id := role.request_of(getattr(message, "ticket_id", "")):
                    self._fail(role, engine_id, RequestFailed.by(error))

    def on_agent_lost(self, rank: int) -> None:
        for role in self._roles:
            self._guarded(partial(role.on_agent_lost, rank))

    def after_step(self, ended: Sequence[RequestEnd], failed: Mapping[str, TandemError]) -> None:
        """`failed`: requests whose output could not be reported, so they end too."""
        for engine_id in failed.keys() - {end.request_id for end in ended}:
            self._fail(self._owner(engine_id), engine_id, failed[engine_id])
        for end in ended:
            owner = self._owner(end.request_id)
            error = failed.get(end.request_id)
            try:
                owner.after_step([end if error is None else RequestEnd(end.request_id, error=error)])
            except BUGS as bug:
                log.exception("the end of a request could not be handled")
                self._fail(owner, end.request_id, RequestFailed.by(bug))

    def tick(self) -> None:
        for role in self._roles:
            self._guarded(role.tick)

    def _guarded(self, call: Callable[[], None]) -> None:
        """A bug in one role's handling does not end the worker."""
        try:
            call()
        except BUGS:
            log.exception("a role failed")

    def _fail(self, owner: RoleHandler, engine_id: str, error: TandemError) -> None:
        try:
            owner.cancel(engine_id, error)
        except BUGS:  # then at least the router learns of it
            log.exception("a request could not be ended")
            self._requests.fail(engine_id, error)

    def _owner(self, engine_id: str) -> RoleHandler:
        return next((role for role in self._roles if role.owns(engine_id)), self._roles[-1])
