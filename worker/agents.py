"""The leader's view of the transfer agents of its worker, one beside each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvtransfer.control import (
    REACHABLE,
    ChangePeers,
    FromAgent,
    LinkReport,
    LinkState,
    Peer,
    StillComputing,
    TakeCensus,
)
from tandem.clock import Clock
from tandem.errors import UnavailableError
from tandem.rpc.identity import WorkerEpoch
from tandem.v1 import worker_pb2

PROBE_AFTER_S = 1.0
UNRESPONSIVE_S = 10.0  # after the probe; an agent that loads torch for its first process group is busy for seconds


class AgentConnection(Protocol):
    @property
    def pid(self) -> int | None:
        """Process id of the agent while it is connected, else None."""
        ...

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks. Drops the message when the agent is gone; the connection reports that loss itself."""
        ...


def peer_changes(before: tuple[Peer, ...], now: tuple[Peer, ...]) -> ChangePeers:
    """What an agent that knows the peers of `before` must be told."""
    known, wanted = _by_worker_epoch(before), _by_worker_epoch(now)
    changed = [peer for name, peers in wanted.items() if known.get(name) != peers for peer in peers]
    return ChangePeers(tuple(changed), tuple(known.keys() - wanted.keys()))


def _by_worker_epoch(peers: tuple[Peer, ...]) -> dict[WorkerEpoch, list[Peer]]:
    found: dict[WorkerEpoch, list[Peer]] = {}
    for peer in peers:
        found.setdefault((peer.worker_id, peer.epoch), []).append(peer)
    return found


@dataclass(slots=True)
class _Unanswered:
    since_s: float
    probed_s: float | None = None


class AgentProbes:
    """Finds agents that are connected but no longer answer: stopped, or hung. Pure.

    An agent that has not answered a message within PROBE_AFTER_S gets a probe. If UNRESPONSIVE_S later it has still
    sent nothing, it counts as unresponsive. An agent without an unanswered message gets no probe, so an idle worker
    sends nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unanswered: dict[int, _Unanswered] = {}  # by rank

    def on_sent(self, rank: int) -> None:
        if rank not in self._unanswered:
            self._unanswered[rank] = _Unanswered(self._clock.now_s())

    def on_received(self, rank: int) -> None:
        """The agent answered; or its connection ended, and there is no other one yet."""
        self._unanswered.pop(rank, None)

    def due(self) -> list[int]:
        """Ranks whose agents need a probe. Each rank is returned once."""
        now_s, unanswered = self._clock.now_s(), self._unanswered
        found = [
            rank for rank, each in unanswered.items() if each.probed_s is None and now_s - each.since_s >= PROBE_AFTER_S
        ]
        for rank in found:
            unanswered[rank].probed_s = now_s
        return found

    def unresponsive(self) -> list[int]:
        """Ranks whose agents must be killed. Each rank is returned once."""
        late_s, unanswered = self._clock.now_s() - UNRESPONSIVE_S, self._unanswered
        found = [rank for rank, each in unanswered.items() if each.probed_s is not None and each.probed_s <= late_s]
        for rank in found:
            del unanswered[rank]
        return found


class Agents:
    """Sends to the agents of all ranks and keeps their link reports. Used by the step loop only."""

    def __init__(self, connections: list[AgentConnection], clock: Clock) -> None:
        self._connections = connections
        self._probes = AgentProbes(clock)
        self._alive = set(range(len(connections)))
        self._links: dict[tuple[int, str, int], LinkReport] = {}

    def send(self, rank: int, message: msgspec.Struct) -> None:
        self._connections[rank].send(message)
        if rank in self._alive:
            self._probes.on_sent(rank)

    def broadcast(self, message: msgspec.Struct) -> None:
        for rank in range(len(self._connections)):
            self.send(rank, message)

    def still_computing(self) -> None:
        """Within a long step: what the agents wait for is late, and not lost. They do not answer."""
        for connection in self._connections:
            connection.send(StillComputing())

    def on_message(self, rank: int, message: FromAgent) -> None:
        self._probes.on_received(rank)
        if isinstance(message, LinkReport):
            key = (rank, message.peer_worker, message.peer_rank)
            if message.state is LinkState.CLOSED:
                self._links.pop(key, None)
            else:
                self._links[key] = message

    def unresponsive(self) -> list[tuple[int, int]]:
        """Probes agents whose answer is overdue. Returns ranks and process ids of those that the caller must kill: the
        connection then reports their loss. Called about once a second."""
        for rank in self._probes.due():
            self._connections[rank].send(TakeCensus())
        found = [(rank, self._connections[rank].pid) for rank in self._probes.unresponsive()]
        return [(rank, pid) for rank, pid in found if pid is not None]

    def lost(self, rank: int) -> None:
        self._alive.discard(rank)
        self._probes.on_received(rank)
        self._links = {key: link for key, link in self._links.items() if key[0] != rank}

    def connected(self, rank: int) -> None:
        self._alive.add(rank)

    def lost_ranks(self) -> list[int]:
        """Ranks without an agent at present: nothing reads or writes their blocks."""
        return [rank for rank in range(len(self._connections)) if rank not in self._alive]

    def require_all(self) -> None:
        """Raises UnavailableError while an agent is being replaced: that rank could not join a new handoff."""
        if lost := self.lost_ranks():
            raise UnavailableError(f"the transfer agents of ranks {lost} are being replaced: try again")

    def forget_all_but(self, peers: set[WorkerEpoch]) -> None:
        """Drops reports about worker epochs that are no longer in the directory."""
        self._links = {key: link for key, link in self._links.items() if (link.peer_worker, link.peer_epoch) in peers}

    def reach(self) -> frozenset[WorkerEpoch]:
        """The worker epochs to which every link of this worker was probed, and is ready or opens when needed."""
        linked = {(link.peer_worker, link.peer_epoch) for link in self._links.values()}
        broken = {(link.peer_worker, link.peer_epoch) for link in self._links.values() if link.state not in REACHABLE}
        return frozenset() if self.lost_ranks() else frozenset(linked - broken)

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
