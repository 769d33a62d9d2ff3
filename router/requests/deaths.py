"""Workers that died or stalled while they computed one request, which may be the cause: it gets to no third one."""

from __future__ import annotations

from collections.abc import Iterable

from router.prefix_index.mirror import WorkerKey
from tandem.errors import RequestQuarantined

MAX_DEATHS = 2  # a request that was computed by so many workers when they died may be the cause


class Deaths:
    def __init__(self) -> None:
        self._died: list[str] = []
        self._suspects: set[WorkerKey] = set()  # stalled, and silent since

    @property
    def is_suspected(self) -> bool:
        """The request may be what stops workers."""
        return bool(self._suspects or self._died)

    @property
    def awaits_suspects(self) -> bool:
        """One worker died with it and another has stalled: the third has to wait for what becomes of that one."""
        return len(self._died) + len(self._suspects) >= MAX_DEATHS

    @property
    def quarantine(self) -> RequestQuarantined | None:
        """The request's end, once too many have died."""
        if len(self._died) < MAX_DEATHS:
            return None
        return RequestQuarantined(
            f"{' and '.join(self._died)} died while they computed this request, which may be the cause: it is not "
            "tried on another worker. The router's log has its shape"
        )

    def stalled(self, worker: WorkerKey) -> None:
        self._suspects.add(worker)

    def heard(self, worker: WorkerKey) -> None:
        self._suspects.discard(worker)

    def died(self, workers: Iterable[WorkerKey]) -> None:
        self._died += [each.worker_id for each in workers]

    def suspect_died(self, worker: WorkerKey) -> None:
        if worker in self._suspects:
            self._suspects.discard(worker)
            self.died([worker])
