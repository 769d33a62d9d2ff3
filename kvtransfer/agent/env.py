"""Environment variables for a transfer agent."""

from __future__ import annotations

from typing import Final

STREAMING_COPY_BYTES: Final = 384 << 10

# glibc uses non-temporal stores, which save a third of the memory traffic, only above a threshold of tens of MB. Runs
# of KV blocks are smaller. glibc reads this variable at process start; other C libraries ignore it.
AGENT_ENV: Final = {
    "OMP_NUM_THREADS": "1",
    # A link that fails is aborted by its owner. torch's watchdogs would end the agent instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={STREAMING_COPY_BYTES}",
}
