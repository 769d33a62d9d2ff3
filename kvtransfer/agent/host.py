"""Which machine, as far as shared memory and unix sockets reach: equal ids can use `mapped`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def host_id() -> str:
    """Boot id, network and mount namespace, user: 16 hex digits of their digest."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(os.getuid())]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
