"""The termination message of a failed start, which `kubectl describe pod` shows as the container's last state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TANDEM_TERMINATION_LOG"
MAX_BYTES = 4096  # the kubelet's limit


def write(message: str, environ: Mapping[str, str] = os.environ) -> None:
    """Writes to the file in TANDEM_TERMINATION_LOG. Ignores write errors: stderr has the same message."""
    if path := environ.get(VARIABLE):
        try:
            Path(path).write_bytes(message.encode(errors="replace")[:MAX_BYTES])
        except OSError:
            pass
