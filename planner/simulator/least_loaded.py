"""Finds the least loaded workers of a large pool without a scan of the pool."""

from __future__ import annotations

from bisect import insort


class LeastLoadedIndex:
    """One bucket of workers per load, in the order of their arrival there. A worker whose load changes stays in its old
    bucket until the next search removes it."""

    def __init__(self) -> None:
        self._load: dict[str, int] = {}  # current load of each worker
        self._buckets: dict[int, list[str]] = {}  # worker ids by load; entries may be stale or duplicate
        self._loads: list[int] = []  # the loads that have a bucket, sorted

    def note(self, worker_id: str, load: int) -> None:
        if self._load.get(worker_id) == load:
            return
        self._load[worker_id] = load
        bucket = self._buckets.get(load)
        if bucket is None:
            self._buckets[load] = [worker_id]
            insort(self._loads, load)
        else:
            bucket.append(worker_id)

    def forget(self, worker_id: str) -> None:
        self._load.pop(worker_id, None)

    def extend(self, chosen: dict[str, None], most: int) -> None:
        """Adds the least loaded workers until `chosen` has `most`."""
        at = 0
        while len(chosen) < most and at < len(self._loads):
            load = self._loads[at]
            if self._extend_from(self._buckets[load], load, chosen, most):
                at += 1
            else:
                del self._buckets[load], self._loads[at]

    def _extend_from(self, bucket: list[str], load: int, chosen: dict[str, None], most: int) -> bool:
        """Returns False if the bucket is empty afterwards."""
        looked_at = 0
        current: dict[str, None] = {}
        for worker_id in bucket:
            looked_at += 1
            if self._load.get(worker_id) == load:
                current[worker_id] = chosen[worker_id] = None
                if len(chosen) >= most:
                    break
        if len(current) < looked_at:
            bucket[:looked_at] = current
        return bool(bucket)
