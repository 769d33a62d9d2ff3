"""All roles of one worker: frames go by their kind, everything about a request to the role that owns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtransfer.control import FromAgent
from tandem.engine.api import RequestEnd
from tandem.errors import InputError, RequestCancelled
from tandem.v1 import worker_pb2
from worker.requests import RequestBook
from worker.role import Role


class RoleSet:
    """Args:
    roles: in the order in which they are asked whether a request is theirs; the last has all that no other owns.
    by_frame: which role takes which kind of a router's frame.
    """

    def __init__(self, requests: RequestBook, roles: Sequence[Role], by_frame: Mapping[str, Role]) -> None:
        self._requests = requests
        self._roles = tuple(roles)
        self._by_frame = by_frame

    def on_frame(self, session: int, frame: worker_pb2.RouterFrame) -> None:
        """Raises TandemError when it is refused."""
        kind = frame.WhichOneof("frame") or ""
        if kind == "cancel":
            if engine_id := self._requests.find(session, frame.cancel.request_id):
                self._owner(engine_id).cancel(engine_id, RequestCancelled("the router cancelled the request"))
        elif kind in self._by_frame:
            self._by_frame[kind].on_frame(session, frame)
        else:
            raise InputError(f"frame: expected one of cancel, {', '.join(self._by_frame)}, got {kind or 'none'}")

    def on_session_closed(self, session: int) -> None:
        for engine_id in self._requests.of_session(session):
            self._owner(engine_id).cancel(engine_id, RequestCancelled("the router's session ended"))

    def on_agent(self, rank: int, message: FromAgent) -> None:
        for role in self._roles:
            role.on_agent(rank, message)

    def on_agent_lost(self, rank: int) -> None:
        for role in self._roles:
            role.on_agent_lost(rank)

    def after_step(self, ended: Sequence[RequestEnd]) -> None:
        owners = [self._owner(end.request_id) for end in ended]
        for role in self._roles:
            own = [end for end, owner in zip(ended, owners, strict=True) if owner is role]
            if own:
                role.after_step(own)

    def tick(self) -> None:
        for role in self._roles:
            role.tick()

    def _owner(self, engine_id: str) -> Role:
        return next((role for role in self._roles if role.owns(engine_id)), self._roles[-1])
