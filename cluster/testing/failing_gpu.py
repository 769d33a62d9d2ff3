"""A rank whose GPU fails in the next step after a file `gpu-fails` appears in its run folder."""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.backends.rank_process import make_roles
from tandem.engine.api import StepResult
from worker.rank import RoleParts, main
from worker.roles import RoleSet

FAULT_FILE = "gpu-fails"


def make_failing_roles(parts: RoleParts) -> RoleSet:
    step, fault = parts.engine.step, Path(parts.launch.run_dir) / FAULT_FILE

    def failing_step() -> StepResult:
        if fault.exists():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return step()

    parts.engine.step = failing_step  # type: ignore[method-assign]
    return make_roles(parts)


if __name__ == "__main__":
    main(make_failing_roles, "A rank whose GPU fails.")
