"""The launch file of a controller, and what it reports to the process that started it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster, ResolvedModel
from tandem import errors
from tandem.config.frozen import Frozen
from tandem.config.observability import LogTarget
from tandem.config.spec import ClusterSpec
from tandem.errors import TandemError

LAUNCH_FILE = "controller.json"
PROGRESS, STARTED, READY, FAILED, BEAT = "progress", "started", "ready", "failed", "beat"  # kinds of reports
BEAT_S = 1.0


class LaunchedModel(Frozen):
    folder: str
    fingerprint: str


class ControllerLaunch(Frozen):
    """`models`: one for each of `spec.models`. `source`, `flags`: see `SpecSource`. `run_base`: holds every private run
    folder of the cluster. `ray_dir`: of a local Ray cluster. `holder`: names the keeper."""

    spec: ClusterSpec
    models: tuple[LaunchedModel, ...]
    devices: tuple[int, ...]
    source: ClusterSpec
    flags: dict[str, Any]
    run_base: str
    log_dir: str
    ray_dir: str
    keeper_socket: str
    holder: str

    @classmethod
    def of(
        cls,
        cluster: ResolvedCluster,
        source: SpecSource,
        *,
        run_base: Path,
        keeper_dir: Path,
        log_dir: Path,
        ray_dir: Path,
    ) -> ControllerLaunch:
        return cls(
            spec=cluster.spec,
            models=tuple(LaunchedModel(folder=str(m.folder), fingerprint=m.fingerprint) for m in cluster.models),
            devices=cluster.devices,
            source=source.spec,
            flags=dict(source.flags),
            run_base=str(run_base),
            log_dir=str(log_dir),
            ray_dir=str(ray_dir),
            keeper_socket=str(keeper_dir / "keeper.sock"),
            holder=secrets.token_hex(8),
        )

    @property
    def logs_to_stdout(self) -> bool:
        return self.spec.observability.logs.target is LogTarget.STDOUT

    @classmethod
    def load(cls, path: Path) -> ControllerLaunch:
        return cls.model_validate_json(path.read_bytes())

    def cluster(self) -> ResolvedCluster:
        models = tuple(
            ResolvedModel.load(spec, Path(each.folder), each.fingerprint)
            for spec, each in zip(self.spec.models, self.models, strict=True)
        )
        return ResolvedCluster(self.spec, models, self.devices)


class StartedReport(Frozen):
    """Every part was started; none need be ready. Addresses are host:port, those of the routers in their order."""

    admin: str
    http: tuple[str, ...]
    grpc: tuple[str, ...]


class FailureReport(Frozen):
    """Why the cluster could not start: a TandemError."""

    kind: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: TandemError) -> FailureReport:
        return cls(kind=type(error).__name__, message=error.message, field=error.field)

    def error(self) -> TandemError:
        kind: type[TandemError] = getattr(errors, self.kind, TandemError)
        return kind(self.message, field=self.field)
