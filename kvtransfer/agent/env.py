"""Environment variables for a transfer agent."""

from __future__ import annotations

from typing import Final

STREAMING_COPY_BYTES: Final = 384 << 10

# glibc uses non-temporal stores, which save a third of the memory traffic, only above a threshold of tens of MB. Runs
# of KV blocks are smaller. glibc reads this variable at process start; other C libraries ignore it.
AGENT_ENV: Final = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={STREAMING_COPY_BYTES}",
}
