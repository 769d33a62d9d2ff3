"""The environment a transfer agent is started with."""

from __future__ import annotations

from typing import Final

STREAMING_COPY_BYTES: Final = 384 << 10

# glibc copies past the cache (without reading the target first, a third of the traffic) only from a size that has to do
# with the shared cache, tens of MB; a run of KV blocks is smaller. It reads this at the start of a process; other C
# libraries ignore it.
AGENT_ENV: Final = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={STREAMING_COPY_BYTES}",
}
