"""The workers of a large pool by load, so that those with least to do are found without a look at the others."""

from __future__ import annotations

from bisect import insort


class LeastLoadedIndex:
    """Workers of one load stand in a line, in the order in which they came to it. Whoever leaves a line stays in it
    until somebody looks there."""

    def __init__(self) -> None:
        self._load: dict[str, int] = {}  # of each worker, now
        self._lines: dict[int, list[str]] = {}  # of worker ids, by load; some are out of date or there twice
        self._loads: list[int] = []  # there is a line of each; sorted

    def note(self, worker_id: str, load: int) -> None:
        if self._load.get(worker_id) == load:
            return
        self._load[worker_id] = load
        line = self._lines.get(load)
        if line is None:
            self._lines[load] = [worker_id]
            insort(self._loads, load)
        else:
            line.append(worker_id)

    def forget(self, worker_id: str) -> None:
        self._load.pop(worker_id, None)

    def extend(self, chosen: dict[str, None], most: int) -> None:
        """Adds those with least to do until there are `most`."""
        at = 0
        while len(chosen) < most and at < len(self._loads):
            load = self._loads[at]
            if self._extend_from(self._lines[load], load, chosen, most):
                at += 1
            else:
                del self._lines[load], self._loads[at]

    def _extend_from(self, line: list[str], load: int, chosen: dict[str, None], most: int) -> bool:
        """False: nobody is left in the line."""
        looked_at = 0
        there: dict[str, None] = {}
        for worker_id in line:
            looked_at += 1
            if self._load.get(worker_id) == load:
                there[worker_id] = chosen[worker_id] = None
                if len(chosen) >= most:
                    break
        if len(there) < looked_at:
            line[:looked_at] = there
        return bool(line)
