"""Checks the spec's GPUs against those of this machine, before anything starts.

The controller imports neither torch nor CUDA: a short-lived process (`cluster.spec.gpu_probe`) looks at the GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from cluster.devices import DeviceBook, GpuReport, device_name
from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec, Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

PROBE_TIMEOUT_S = 120.0  # importing torch and opening eight GPUs takes seconds, on a busy machine more

GpuProbe = Callable[[], GpuReport]


@dataclass(frozen=True, slots=True)
class GpuWorkers:
    """The workers of one role that run on GPUs."""

    model: ModelSpec
    role: Role
    engine: EngineSpec

    @property
    def tp(self) -> int:
        return self.model.pool(self.role).tp

    def field(self, name: str) -> str:
        return self.model.engine_field(self.role, name)

    def names(self) -> Iterator[str]:
        for number in range(self.model.pool(self.role).workers):
            yield f"{self.model.served_name} {self.role}-{number}"


def gpu_workers(spec: ClusterSpec) -> list[GpuWorkers]:
    """Largest shares first, the order in which they are placed."""
    found = [
        GpuWorkers(model, role, model.engine_of(role)) for model in spec.models for role in Role
        if model.pool(role).workers and model.engine_of(role).on_gpu
    ]  # fmt: skip
    return sorted(found, key=lambda each: -each.engine.device_share)


def probe_gpus() -> GpuReport:
    """Raises ConfigError if the probe fails."""
    command = (sys.executable, "-P", "-m", "cluster.spec.gpu_probe")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        return GpuReport.model_validate_json(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
    except (IndexError, ValidationError) as error:
        reason = f"unexpected output: {type(error).__name__}"
    raise ConfigError(
        f"engine.device: cannot look at this machine's GPUs ({reason}): run `nvidia-smi`; if it fails too, repair the "
        "driver, or use cpu",
        field="engine.device",
    )


def resolve_devices(spec: ClusterSpec, probe: GpuProbe) -> tuple[int, ...]:
    """Ordinals of the GPUs of this machine that workers use; empty if none run on GPUs here.

    Raises ConfigError if the workers do not fit them. With `control.ray_address`, Ray's nodes have the GPUs.
    """
    wanted = gpu_workers(spec)
    if not wanted or spec.control.ray_address is not None:
        return ()
    report = probe()
    _check_cuda(report, wanted[0])
    ordinals = _allowed(spec, report)
    book = DeviceBook(ordinals)
    for workers in wanted:
        for name in workers.names():
            book.assign(name, workers.tp, workers.engine.device_share, workers.engine.device)
    return ordinals


def _check_cuda(report: GpuReport, workers: GpuWorkers) -> None:
    field, device = workers.field("device"), workers.engine.device
    if report.cuda is None:
        raise ConfigError(
            f"{field}: expected a CUDA build of torch for {device}, got torch {report.torch} without CUDA: install a "
            "CUDA build, or use cpu",
            field=field,
        )
    if not report.gpus:
        raise ConfigError(
            f"{field}: expected a GPU for {device}, and torch {report.torch} (CUDA {report.cuda}) finds none: check "
            "`nvidia-smi`, the driver and CUDA_VISIBLE_DEVICES, or use cpu",
            field=field,
        )


def _allowed(spec: ClusterSpec, report: GpuReport) -> tuple[int, ...]:
    present = tuple(gpu.ordinal for gpu in report.gpus)
    given = spec.control.devices
    if given is None:
        return present
    if missing := [each for each in given if each not in present]:
        names = ", ".join(map(device_name, present))
        raise ConfigError(
            f"control.devices: expected ordinals of this machine's GPUs ({names}), got {', '.join(map(str, missing))}: "
            "remove what is not there, or unset it for all GPUs",
            field="control.devices",
        )
    return given
