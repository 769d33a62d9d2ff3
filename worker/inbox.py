"""What reaches the leader's loop from outside: the service, the transfer agents, signals."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from kvtransfer.control import FromAgent
from worker.messages import ToLeader


@dataclass(frozen=True, slots=True)
class AgentSaid:
    rank: int
    message: FromAgent


@dataclass(frozen=True, slots=True)
class AgentLost:
    rank: int


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """The leader's connection to this rank's agent stands (again)."""

    rank: int


@dataclass(frozen=True, slots=True)
class Stop:
    reason: str


Event = ToLeader | AgentSaid | AgentLost | AgentConnected | Stop


class Inbox:
    """Filled by the I/O thread, emptied by the step loop."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._events.put(event)

    def wait(self, timeout_s: float) -> list[Event]:
        """Events that are there; when there is none, the first to come within `timeout_s`."""
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        return events + self.drain()

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events
