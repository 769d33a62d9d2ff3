"""What each request that is on workers is charged with in their accounts."""

from __future__ import annotations

from collections.abc import Iterator

from router.requests.run import RequestRun
from router.workers.account import Charge
from router.workers.fleet import Worker


class Charges:
    """Iterates over the requests that are on workers."""

    def __init__(self) -> None:
        self._of: dict[RequestRun, list[tuple[Worker, Charge]]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, run: RequestRun) -> bool:
        return run in self._of

    def __iter__(self) -> Iterator[RequestRun]:
        return iter(self._of)

    def place(self, run: RequestRun, decode: Worker, prefill: Worker | None, blocks: int, tokens: int) -> None:
        """`tokens`: to compute, by the prefill worker or, without one, by the decode worker."""
        self._of[run] = []
        self.add(run, decode, Charge(tokens if prefill is None else 0, blocks))
        if prefill is not None:
            self.add(run, prefill, Charge(tokens, blocks))

    def add(self, run: RequestRun, worker: Worker, charge: Charge) -> None:
        worker.account.add(charge)
        self._of[run].append((worker, charge))

    def sent(self, run: RequestRun, worker: Worker) -> None:
        """The frame that takes it there is the link's last."""
        for charged, charge in self._of.get(run, []):
            if charged is worker:
                charge.frame = worker.link.sent_frames

    def prefill_tokens(self, run: RequestRun) -> int:
        return sum(charge.prefill_tokens for _, charge in self._of.get(run, []))

    def prefilled(self, run: RequestRun) -> None:
        for worker, charge in self._of.get(run, []):
            worker.account.prefilled(charge)

    def leave(self, run: RequestRun, worker: Worker) -> None:
        charges = self._of.get(run, [])
        for charged, charge in charges:
            if charged is worker:
                worker.account.remove(charge)
        self._of[run] = [each for each in charges if each[0] is not worker]

    def release(self, run: RequestRun) -> None:
        for worker, charge in self._of.pop(run, []):
            worker.account.remove(charge)
