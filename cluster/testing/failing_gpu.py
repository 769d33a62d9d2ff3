"""A rank whose GPU fails. A file `gpu-fails` in its run folder holds the number of steps before that."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import torch

from cluster.backends.rank_process import make_roles
from tandem.engine.api import StepResult
from worker.rank import RoleParts, main
from worker.roles import RoleSet

FAULT_FILE = "gpu-fails"


def make_failing_roles(parts: RoleParts) -> RoleSet:
    step, fault, steps = parts.engine.step, Path(parts.launch.run_dir) / FAULT_FILE, count()

    def failing_step() -> StepResult:
        if fault.exists() and next(steps) == int(fault.read_text()):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return step()

    parts.engine.step = failing_step  # type: ignore[method-assign]
    return make_roles(parts)


if __name__ == "__main__":
    main(make_failing_roles, "A rank whose GPU fails.")
