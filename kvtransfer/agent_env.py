"""The environment a transfer agent is started with."""

from __future__ import annotations

from typing import Final

STREAMING_COPY_BYTES: Final = 512 << 10

# glibc reads these at the start of a process; other C libraries ignore them. It copies past the cache (without reading
# the target first, a third of the traffic) only from a size that has to do with the shared cache, tens of MB; a run of
# KV blocks is smaller. And `rep movsb` is several times slower on some processors when target and source lie a few
# bytes apart modulo a page (glibc bug 30994).
_TUNABLES: Final = {
    "glibc.cpu.x86_non_temporal_threshold": STREAMING_COPY_BYTES,
    "glibc.cpu.x86_rep_movsb_threshold": 1 << 30,
}
AGENT_ENV: Final = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": ":".join(f"{name}={value}" for name, value in _TUNABLES.items()),
}
