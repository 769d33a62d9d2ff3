"""Events for the leader's loop: from the service, the transfer agents and signals."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from kvtransfer.control import FromAgent
from tandem.engine.api import AdapterFiles
from worker.messages import ServiceToLeader


@dataclass(frozen=True, slots=True)
class AgentMessage:
    rank: int
    message: FromAgent


@dataclass(frozen=True, slots=True)
class AgentLost:
    rank: int


@dataclass(frozen=True, slots=True)
class AgentStuck:
    """This rank's agent was killed, but its process does not end: it may still write to blocks."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """The leader is connected to this rank's agent, for the first time or again."""

    rank: int


@dataclass(frozen=True, slots=True)
class AdapterCopied:
    """`adapter`: the copy. `failure`: why there is none; else empty."""

    adapter: AdapterFiles
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ImagesRead:
    """Of a request of this session. `result`: of ExpandImages, or what the engine has read of the images of its work,
    or why it cannot."""

    session: int
    request_id: str
    result: object


@dataclass(frozen=True, slots=True)
class Stop:
    reason: str


LeaderEvent = (
    ServiceToLeader | AgentMessage | AgentLost | AgentStuck | AgentConnected | AdapterCopied | ImagesRead | Stop
)


class Inbox:
    """Filled by the I/O thread, emptied by the step loop."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[LeaderEvent] = queue.SimpleQueue()

    def put(self, event: LeaderEvent) -> None:
        self._events.put(event)

    def wait(self, timeout_s: float) -> list[LeaderEvent]:
        """Returns all queued events; if there are none, waits up to `timeout_s` for the first."""
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        return events + self.drain()

    def drain(self) -> list[LeaderEvent]:
        events: list[LeaderEvent] = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events
