"""How the router's prefix index hears of the workers' caches: events that come a moment late, snapshots after a gap."""

from __future__ import annotations

from planner.simulator.events import EventLoop
from planner.simulator.fleet import SimFleet
from planner.simulator.worker import SimWorker
from router.prefix_index.mirror import PrefixMirror, WorkerKey
from tandem.kvcache.prefix_events import PrefixEvent, PrefixSnapshot

LAG_S = 0.25  # as often as a router looks
LOOKS_PER_S = 2000  # at workers, in all: thousands of them are looked at less often


class CacheFeed:
    def __init__(self, loop: EventLoop, memory_bytes: int, fleet: SimFleet) -> None:
        self.mirror = PrefixMirror(memory_bytes)
        self._loop, self._fleet = loop, fleet
        self._is_down = False
        self._lag_s = max(LAG_S, len(fleet.workers) / LOOKS_PER_S)
        for worker in fleet.workers.values():
            self.load(worker)

    def load(self, worker: SimWorker) -> None:
        """The whole of what it holds."""
        worker.blocks.take_events()
        worker.event_seq += 1
        hashes = b"".join(worker.blocks.hashes())
        self.mirror.load(worker.key.worker_id, PrefixSnapshot(worker.key.epoch, worker.event_seq, hashes))

    def changed(self, worker: SimWorker) -> None:
        if not worker.events_due:
            worker.events_due = True
            self._loop.at(self._loop.now_s() + self._lag_s, self._flush, worker)

    def _flush(self, worker: SimWorker) -> None:
        worker.events_due = False
        if self._is_down or worker.lost:
            return
        events = []
        for event in worker.blocks.take_events():
            worker.event_seq += 1
            events.append(PrefixEvent(worker.key.epoch, worker.event_seq, event.stored, b"".join(event.hashes)))
        if events:
            self.mirror.apply(worker.key, events)

    def drop(self, key: WorkerKey) -> None:
        self.mirror.drop(key)

    def redis_lost(self) -> None:
        self._is_down = True

    def redis_back(self) -> None:
        """Workers write their snapshots anew."""
        self._is_down = False
        for worker in self._fleet.workers.values():
            self.load(worker)
