"""Feeds the router's prefix index from the simulated caches: events with a delay, snapshots after a gap."""

from __future__ import annotations

from planner.simulator.events import EventLoop
from planner.simulator.fleet import SimFleet
from planner.simulator.worker import SimWorker
from router.prefix_index.mirror import PrefixMirror, WorkerKey
from tandem.kvcache.prefix_events import PrefixEvent, PrefixSnapshot

LAG_S = 0.25  # a router's poll interval
MAX_FLUSHES_PER_S = 2000  # of all workers together; with thousands of workers the delay grows


class CacheFeed:
    def __init__(self, loop: EventLoop, memory_bytes: int, fleet: SimFleet) -> None:
        self.mirror = PrefixMirror(memory_bytes)
        self._loop, self._fleet = loop, fleet
        self._is_down = False
        self._lag_s = max(LAG_S, len(fleet.workers) / MAX_FLUSHES_PER_S)
        for worker in fleet.workers.values():
            self.load(worker)

    def load(self, worker: SimWorker) -> None:
        """Loads a snapshot of the worker's cache."""
        worker.blocks.take_events()
        worker.event_seq += 1
        hashes = b"".join(worker.blocks.hashes())
        self.mirror.load(worker.key.worker_id, PrefixSnapshot(worker.key.epoch, worker.event_seq, hashes))

    def changed(self, worker: SimWorker) -> None:
        if not worker.events_due:
            worker.events_due = True
            self._loop.call_at(self._loop.now_s() + self._lag_s, self._flush, worker)

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
        """Workers write new snapshots."""
        self._is_down = False
        for worker in self._fleet.workers.values():
            self.load(worker)
