"""What this host has that transports need beyond Python: libraries and devices.

Each is looked at when a transport first needs it, and once per process: it may load torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvtransfer.connection.handshake import NCCL, NIXL

RDMA_DEVICES = Path("/dev/infiniband")


@cache
def why_no_nixl(package: str = "nixl") -> str:
    """Why NIXL cannot be used, with the remedy; empty if it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install 'tandem-serve[nixl]'"
    try:
        importlib.import_module(f"{package}._api")
    except Exception as error:  # a library that it loads may be missing or too old
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        return f"{package} cannot be loaded ({reason}): pip install --force-reinstall 'tandem-serve[nixl]'"
    return ""


@cache
def why_no_nccl() -> str:
    """Why torch's NCCL cannot be used, with the remedy; empty if it can."""
    import torch  # noqa: PLC0415 - agents of pools in host memory need no torch
    from torch import distributed  # noqa: PLC0415

    if distributed.is_available() and distributed.is_nccl_available():
        return ""
    return f"torch {torch.__version__} has no NCCL: install a CUDA build of torch"


@cache
def has_rdma(devices: Path = RDMA_DEVICES) -> bool:
    """Whether this process may use an RDMA device.

    A pod sees all the host's devices in /sys/class/infiniband, but can open only those that it was given.
    """
    return any(_can_open(path) for path in devices.glob("uverbs*"))


def _can_open(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class HostSupport:
    """`missing`: why a transport's library cannot be used, with the remedy; empty if it can, or if it needs none."""

    missing: Callable[[str], str]
    has_rdma: Callable[[], bool]


def missing_library(kind: str) -> str:
    """As HostSupport.missing, of this process."""
    if kind == NIXL:
        return why_no_nixl()
    return why_no_nccl() if kind == NCCL else ""


THIS_HOST = HostSupport(missing_library, has_rdma)
