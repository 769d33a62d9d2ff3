"""One worker of the spec: starts all its ranks, watches them, and restarts them all when one ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.backends.protocol import MemberHandle
from cluster.control.record import WorkerRecord, WorkerState
from cluster.keeper.members import MemberEnd, MemberStart, ProcessSpec, RunningProcess, is_running
from cluster.keeper.supervisor import python
from cluster.spec.resolve import ResolvedModel
from cluster.tasks import count_failure
from kvtransfer.agent.env import AGENT_ENV
from tandem.config.launch import WorkerLaunch
from tandem.config.model import PoolSpec, Role
from tandem.config.spec import ClusterSpec
from tandem.v1 import cluster_pb2
from worker.exit_codes import GPU_LOST_EXIT_CODE, WRONG_CONFIG_EXIT_CODE

log = logging.getLogger(__name__)

FAILED_STARTS = 3  # a worker that ends so often without becoming ready is given up
FAILED_GPU_STARTS = 5
MAX_BACKOFF_S = 10.0
MAX_DOUBLINGS = 10  # of the backoff: more is longer than MAX_BACKOFF_S, and 1024 overflow
RANK_GRACE_S = 1.5  # a rank stops between two steps; one that hangs with a lost peer never does
STABLE_S = 10.0  # a worker that was ready for so long restarts without backoff

Place = Callable[[], Awaitable[Sequence[MemberHandle]]]


def _telling(ends: Sequence[MemberEnd]) -> MemberEnd:
    """Of those of several ranks the one that says why: the others may have died of it."""
    known = (GPU_LOST_EXIT_CODE, WRONG_CONFIG_EXIT_CODE)
    return min(ends, key=lambda end: (end.exit_code not in known, end.reason))


def _is_gpu_loss(end: MemberEnd) -> bool:
    return end.exit_code == GPU_LOST_EXIT_CODE


def new_epoch() -> int:
    """A random positive number of 62 bits, which fits a signed 64-bit integer. Never 0."""
    return secrets.randbits(62) + 1


@dataclass(slots=True)
class EpochSettings:
    """What every epoch of every worker is started with. The log level may change; it holds from the next epoch on."""

    spec: ClusterSpec
    controller_address: str
    redis_url: str | None
    run_base: Path
    log_level: str = "info"


class WorkerSlot:
    """Calls `on_change` whenever the worker enters or leaves READY.

    `place` gives the members. With a `record`, the worker is there as it tells before its members are placed: a host
    that has no room must not keep the others from being taken over.

    `epoch` is the running epoch or, between two epochs, the next one: an ended epoch can no longer register.
    """

    def __init__(
        self,
        worker_id: str,
        role: Role,
        model: ResolvedModel,
        place: Place,
        settings: EpochSettings,
        on_change: Callable[[WorkerSlot], None],
        record: WorkerRecord | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.model = model
        self.state = WorkerState.STARTING
        self.reason = ""
        self.epoch = new_epoch()
        self.restarts = 0
        self.info: cluster_pb2.WorkerInfo | None = None
        self.drain: cluster_pb2.Drain.ValueType = cluster_pb2.DRAIN_NONE
        self._place = place
        self._members: list[MemberHandle] | None = None  # None: not placed
        self._is_taken_over = record is not None
        self._settings = settings
        self._on_change = on_change
        self._failures = 0
        self._was_ever_ready = False
        self._ready_since_s: float | None = None
        self._gpu_losses = 0  # starts in a row that failed on a GPU
        self._restart_reason: asyncio.Future[MemberEnd] | None = None  # resolved by `restart`
        self._watched_epoch = 0  # that `_restart_reason` is of
        self._early_restart = ""  # the reason, if one was asked for before this controller watches the epoch
        if record is not None:
            self._continue(record)

    def _continue(self, record: WorkerRecord) -> None:
        """Takes over what an earlier controller started."""
        self.state, self.reason = record.state, record.reason
        self.epoch, self.restarts = record.epoch, record.restarts
        self._was_ever_ready = record.was_ever_ready
        if record.info:
            self.info = cluster_pb2.WorkerInfo.FromString(bytes.fromhex(record.info))
            self._ready_since_s = asyncio.get_running_loop().time()

    def record(self, devices: tuple[str, ...] = ()) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            model=self.model.spec.served_name,
            role=self.role,
            epoch=self.epoch,
            restarts=self.restarts,
            state=self.state,
            reason=self.reason,
            was_ever_ready=self._was_ever_ready,
            info=self.info.SerializeToString().hex() if self.info is not None else "",
            devices=devices,
        )

    async def run(self) -> None:
        """Runs one epoch after another until cancelled or given up."""
        try:
            if self.is_given_up:  # taken over so
                self._members = list(await self._place())  # which it keeps until it is removed
            while not self.is_given_up:
                self._epoch_ended(await self._observed_epoch())
                await self._stop()
                if not self.is_given_up:
                    await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2 ** min(self._failures, MAX_DOUBLINGS)))
        finally:
            await self._stop()

    @property
    def is_given_up(self) -> bool:
        return self.state is WorkerState.FAILED

    @property
    def pool(self) -> PoolSpec:
        """The pool of its role."""
        return self.model.spec.pool(self.role)

    def accepts(self, epoch: int) -> bool:
        return epoch == self.epoch and self.state is not WorkerState.FAILED

    def registered(self, info: cluster_pb2.WorkerInfo) -> None:
        was_ready = self.state is WorkerState.READY  # it registers again with another controller, or other agents
        self.info = info
        self._was_ever_ready = True
        self._gpu_losses = 0
        self.state, self.reason = WorkerState.READY, ""
        if not was_ready:
            self._ready_since_s = asyncio.get_running_loop().time()
            self._on_change(self)

    def refuse(self, reason: str) -> None:
        """Gives the worker up: it can never work."""
        self.state, self.reason = WorkerState.FAILED, reason
        self._on_change(self)

    def restart(self, reason: str) -> None:
        """Ends the running epoch; the next one starts after the usual backoff."""
        if self._watched_epoch != self.epoch:  # it has not begun
            self._early_restart = reason
        elif self._restart_reason is not None and not self._restart_reason.done():
            self._restart_reason.set_result(MemberEnd(reason=reason))

    async def processes(self) -> list[RunningProcess]:
        found = await asyncio.gather(*(member.running() for member in self._members or ()))
        return [process for member in found if member is not None for process in member.processes]

    async def _observed_epoch(self) -> MemberEnd:
        """An epoch that cannot be run ends like any other, unless the worker never was ready: the start says why. A
        worker that is taken over may get a place later."""
        try:
            return await self._run_epoch()
        except Exception as error:
            if not self._was_ever_ready and not self._is_taken_over:
                raise
            count_failure(self.worker_id, "an epoch could not be run")
            return MemberEnd(reason=f"its epoch could not be run: {error}")

    async def _run_epoch(self) -> MemberEnd:
        """Returns why the epoch ended."""
        if self._members is None:
            self._members = list(await self._place())
        if (ended := await self._start_members(self._members)) is not None:
            return ended
        self._restart_reason = asyncio.get_running_loop().create_future()
        self._watched_epoch = self.epoch
        if self._early_restart:
            self._restart_reason.set_result(MemberEnd(reason=self._early_restart))
            self._early_restart = ""
        ends: list[asyncio.Future[MemberEnd]] = [asyncio.ensure_future(member.wait_end()) for member in self._members]
        ends.append(self._restart_reason)
        timeout_s = self._settings.spec.control.start_timeout_s
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.state is not WorkerState.READY and not any(end.done() for end in ends):
                return MemberEnd(
                    reason=f"{self.worker_id} was not ready within {timeout_s:g} s (control.start_timeout_s)"
                )
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return _telling([end.result() for end in done])
        finally:
            for end in ends:
                end.cancel()

    async def _start_members(self, members: Sequence[MemberHandle]) -> MemberEnd | None:
        """Starts every rank, unless an earlier controller has. Returns why the epoch ended meanwhile; None: it runs."""
        launch = self._launch()
        starts = [self._start(launch, rank) for rank in range(len(members))]
        found = await asyncio.gather(*(member.running() for member in members))
        if not all(map(is_running, found, starts)):
            if self.state is WorkerState.READY or any(found):
                ends = [each.end for each in found if each is not None and each.end is not None]
                return _telling(ends) if ends else MemberEnd(reason=f"{self.worker_id} did not run completely")
            await asyncio.gather(*(member.start(start) for member, start in zip(members, starts, strict=True)))
        return None

    def _epoch_ended(self, end: MemberEnd) -> None:
        self.info = None
        self.drain = cluster_pb2.DRAIN_NONE
        if self.state is WorkerState.FAILED:
            return  # the reason of the refusal says more
        self.reason = end.reason
        self.epoch = new_epoch()
        self.restarts += 1
        self._failures = 1 if self._was_stable() else self._failures + 1
        self._gpu_losses += self._ready_since_s is None and _is_gpu_loss(end)
        self._ready_since_s = None
        given_up = self._cannot_start(end)
        self.state = WorkerState.FAILED if given_up else WorkerState.RESTARTING
        log.warning("%s ended: %s", self.worker_id, self.reason)
        self._on_change(self)

    def _cannot_start(self, end: MemberEnd) -> bool:
        """A worker that was ready once is restarted for ever, except on a dead GPU. It keeps that GPU reserved, so that
        no other worker starts there."""
        if self._gpu_losses >= FAILED_GPU_STARTS:
            self.reason = (
                f"{self._gpu_losses} starts in a row failed on its GPU, which stays reserved: repair it, or remove "
                f"the worker (`tandem drain {self.worker_id}`); {self.reason}"
            )
            return True
        tries = 1 if end.exit_code == WRONG_CONFIG_EXIT_CODE else FAILED_STARTS
        return not self._was_ever_ready and self._failures >= tries

    def _was_stable(self) -> bool:
        """A worker that ends right after it became ready restarts with growing backoff."""
        now_s = asyncio.get_running_loop().time()
        return self._ready_since_s is not None and now_s - self._ready_since_s >= STABLE_S

    async def _stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self._members or ()), return_exceptions=True)

    def _launch(self) -> WorkerLaunch:
        spec = self._settings.spec
        return WorkerLaunch(
            cluster=spec.name,
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            model=self.model.spec,
            engine=self.model.spec.engine_of(self.role),
            model_dir=str(self.model.folder),
            transfer=spec.transfer,
            controller_address=self._settings.controller_address,
            redis_url=self._settings.redis_url,
            run_dir=str(self._settings.run_base / f"{self.worker_id}-{self.epoch:x}"),
            tls=spec.security.tls,
            log_level=self._settings.log_level,
            log_format=spec.observability.logs.format,
        )

    def _start(self, launch: WorkerLaunch, rank: int) -> MemberStart:
        launch_file = f"{launch.run_dir}/launch.json"
        threads = str(launch.engine.threads_per_rank)
        # Idle OpenMP threads spin for about 50 µs, then sleep: other processes need the cores too.
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "1000"}
        processes = [
            ProcessSpec(
                name=f"agent-{rank}",
                argv=python("kvtransfer.agent", *_agent_options(launch, rank)),
                env=AGENT_ENV,
                restart=True,
            ),
            ProcessSpec(
                name=f"rank-{rank}",
                argv=python("cluster.backends.rank_process", "--launch", launch_file, "--rank", str(rank)),
                env=env,
                stop_grace_s=RANK_GRACE_S,
                on_device=True,
            ),
        ]
        if rank == 0:
            processes.append(ProcessSpec(name="service", argv=python("worker.service", "--launch", launch_file)))
        files = {"launch.json": launch.model_dump_json()}
        return MemberStart(run_dir=launch.run_dir, files=files, processes=tuple(processes))


def _agent_options(launch: WorkerLaunch, rank: int) -> tuple[str, ...]:
    return ("--socket", str(launch.agent_socket(rank)), "--log-format", launch.log_format.value)
