"""Faults: a worker that is lost, and comes back under a new epoch; a request it failed; a link that is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.simulator.events import EventLoop
from planner.simulator.recorder import Recorder
from planner.simulator.requests import SimRequest
from planner.simulator.sequence import BlockNames
from planner.simulator.setup import Setup
from planner.simulator.worker import SimWorker
from tandem.config.spec import Role
from tandem.errors import TandemError, WorkerLost

if TYPE_CHECKING:
    from planner.simulator.cluster import SimCluster


class Losses:
    def __init__(
        self, cluster: SimCluster, setup: Setup, loop: EventLoop, recorder: Recorder, names: BlockNames
    ) -> None:
        self._cluster, self._setup, self._loop, self._recorder, self._names = cluster, setup, loop, recorder, names

    def lose_worker(self, worker_id: str, back_after_s: float | None) -> None:
        """Its requests go on elsewhere: their prompts and what was answered are computed again."""
        worker = self._cluster.fleet.workers[worker_id]
        self._cluster.fleet.lose(worker)
        self._cluster.cache.drop(worker.key)
        error = WorkerLost(f"{worker_id} was lost")
        for request in [each for each in self._cluster.running.values() if worker in each.workers]:
            self.move_on(request, worker, error)
        if back_after_s is not None:
            key = worker.key
            self._loop.at(self._loop.now_s() + back_after_s, self._come_back, key.worker_id, worker.role, key.epoch + 1)

    def _come_back(self, worker_id: str, role: Role, epoch: int) -> None:
        self._cluster.cache.load(self._cluster.fleet.start(worker_id, role, epoch))
        self._cluster.pump()

    def move_on(self, request: SimRequest, lost: SimWorker, error: TandemError) -> None:
        """To other workers, as often as the router does that."""
        if lost is request.prefill and request.landed_s is not None and request.first_token_s is not None:
            return  # it has left that worker
        if request.migrations >= self._setup.router.max_migrations:
            self._cluster.fail(request, request.attempt, error)
            return
        answered = self._answered(request)
        if answered and self._setup.caches:
            full = (request.prompt_tokens + answered) // self._setup.block_tokens
            own = self._names.own(request.index, len(request.block_hashes), full)
            request.block_hashes = request.block_hashes + own
        if answered:
            request.prompt_tokens += answered
            request.output_tokens -= answered
            request.was_answered = True
        request.migrations += 1
        self._recorder.migrations[request.index] += 1
        request.waiting_since_s = self._loop.now_s()
        self._cluster.put_back(request, None)

    def _answered(self, request: SimRequest) -> int:
        """Tokens of this attempt that the router has; also notes when the last of them came."""
        if request.first_token_s is None:
            return 0
        sequence = request.sequence
        if sequence is None or sequence.last_token_s <= 0:
            return 1
        self._recorder.last_token_s[request.index] = sequence.last_token_s
        return min(max(1, sequence.generated), request.output_tokens - 1)

    def slow_link(self, worker_id: str, factor: float) -> None:
        """`factor` 1 makes it whole again."""
        worker = self._cluster.fleet.workers.get(worker_id)
        if worker is not None:
            for port in (worker.egress, worker.ingress):
                port.slowdown = factor
