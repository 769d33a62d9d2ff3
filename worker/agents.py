"""The leader's view of the transfer agents of its worker, one beside each rank."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvtransfer.control import FromAgent, LinkReport, TakeCensus
from tandem.clock import Clock
from tandem.errors import UnavailableError
from tandem.v1 import worker_pb2
from worker.agent_watch import AgentWatch


class AgentConnection(Protocol):
    @property
    def pid(self) -> int | None:
        """Of the agent, while there is a connection."""
        ...

    def send(self, message: msgspec.Struct) -> None:
        """Never waits; drops the message when the agent is gone (its loss is reported)."""
        ...


class Agents:
    """Sends to all ranks' agents and keeps what they report about links. Used by the step loop only."""

    def __init__(self, connections: list[AgentConnection], clock: Clock) -> None:
        self._connections = connections
        self._watch = AgentWatch(clock)
        self._alive = set(range(len(connections)))
        self._links: dict[tuple[int, str, int], LinkReport] = {}

    def send(self, rank: int, message: msgspec.Struct) -> None:
        self._connections[rank].send(message)
        if rank in self._alive:
            self._watch.told(rank)

    def broadcast(self, message: msgspec.Struct) -> None:
        for rank in range(len(self._connections)):
            self.send(rank, message)

    def note(self, rank: int, message: FromAgent) -> None:
        self._watch.heard(rank)
        if isinstance(message, LinkReport):
            key = (rank, message.peer_worker, message.peer_rank)
            if message.state == "closed":
                self._links.pop(key, None)
            else:
                self._links[key] = message

    def silent(self) -> list[tuple[int, int]]:
        """Ranks and process ids of agents that answer nothing any more and are to be ended: then their loss is heard
        of. Asks those that owe us a word. Called about once a second."""
        for rank in self._watch.to_ask():
            self._connections[rank].send(TakeCensus())
        found = [(rank, self._connections[rank].pid) for rank in self._watch.silent()]
        return [(rank, pid) for rank, pid in found if pid is not None]

    def lost(self, rank: int) -> None:
        self._alive.discard(rank)
        self._watch.heard(rank)
        self._links = {key: link for key, link in self._links.items() if key[0] != rank}

    def connected(self, rank: int) -> None:
        self._alive.add(rank)

    def lost_ranks(self) -> list[int]:
        """Ranks whose agent is gone at present: they neither read nor write."""
        return [rank for rank in range(len(self._connections)) if rank not in self._alive]

    def require_all(self) -> None:
        """Raises UnavailableError while an agent is being replaced: a new handoff could not be told to it."""
        if lost := self.lost_ranks():
            raise UnavailableError(f"the transfer agents of ranks {lost} are being replaced: try again")

    def forget_all_but(self, peers: set[tuple[str, int]]) -> None:
        """Drops reports about lives (worker, epoch) that the directory no longer has."""
        self._links = {key: link for key, link in self._links.items() if (link.peer_worker, link.peer_epoch) in peers}

    def reach(self) -> frozenset[tuple[str, int]]:
        """The lives (worker, epoch) to which every link that this worker has was probed and is ready."""
        lives = {(link.peer_worker, link.peer_epoch) for link in self._links.values()}
        broken = {(link.peer_worker, link.peer_epoch) for link in self._links.values() if link.state != "ready"}
        return frozenset() if self.lost_ranks() else frozenset(lives - broken)

    def links(self) -> list[worker_pb2.LinkState]:
        return [
            worker_pb2.LinkState(
                peer_worker=link.peer_worker,
                peer_epoch=link.peer_epoch,
                rank=rank,
                peer_rank=link.peer_rank,
                transport=link.transport,
                state=link.state,
                reason=link.reason,
                bytes=link.bytes,
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
            )
            for (rank, _, _), link in sorted(self._links.items())
        ]
