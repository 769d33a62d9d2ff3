"""The names by which workers know a request: one for each attempt, lest words about an earlier one be taken for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.requests.run import RequestRun
    from router.workers.fleet import Worker
    from router.workers.link import WorkerLink


class WireNames:
    """Which workers may know one request now, and by what wire id. Does not know the run, which has it: what leads back
    to itself waits for the collector."""

    def __init__(self) -> None:
        self._on: list[tuple[Worker, str]] = []

    def __bool__(self) -> bool:
        return bool(self._on)

    def attach(self, worker: Worker, wire_id: str, run: RequestRun) -> None:
        """What the worker says about `wire_id` reaches `run` from now on."""
        worker.link.attach(wire_id, run)
        self._on.append((worker, wire_id))

    def detach(self, link: WorkerLink) -> None:
        for worker, wire_id in self._on:
            if worker.link is link:
                link.detach(wire_id)
        self._on = [(worker, wire_id) for worker, wire_id in self._on if worker.link is not link]

    def cancel(self, worker: Worker) -> None:
        """On this worker alone."""
        for each, wire_id in self._on:
            if each is worker:
                worker.link.cancel(wire_id)
        self.detach(worker.link)

    def leave(self, reporting: Worker | None) -> None:
        """Cancels it everywhere. `reporting`: a worker whose report on a handoff that is done may still come."""
        for worker, wire_id in self._on:
            worker.link.cancel(wire_id)
            if worker is reporting:
                worker.link.detach_but_report(wire_id)
            else:
                worker.link.detach(wire_id)
        self._on.clear()
