"""Why a start failed, where Kubernetes looks for it: `kubectl describe pod` shows it as the container's last state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TANDEM_TERMINATION_LOG"
MAX_BYTES = 4096  # the kubelet reads no more


def leave(message: str, environ: Mapping[str, str] = os.environ) -> None:
    """Into the file that TANDEM_TERMINATION_LOG names; the same is on stderr, so that it may fail in silence."""
    if path := environ.get(VARIABLE):
        try:
            Path(path).write_bytes(message.encode(errors="replace")[:MAX_BYTES])
        except OSError:
            pass
