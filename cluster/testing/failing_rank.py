"""A rank that fails: its GPU, after a number of steps that a file `gpu-fails` in its run folder holds, or in the steps
of requests whose prompts begin so that they kill it, make its model raise, break the handling of their frames, take a
second in each layer, or never end."""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from pathlib import Path

import torch

from cluster.backends.rank_process import make_roles
from tandem.engine.api import StepResult
from tandem.engine.engine import TandemEngine
from tandem.engine.output import Launched
from tandem.engine.step import StepInput
from tandem.v1 import worker_pb2
from worker.rank import RoleParts, main
from worker.roles import RoleSet

FAULT_FILE = "gpu-fails"
KILLS, RAISES, BREAKS, CRAWLS, HANGS = ([token] * 5 for token in range(7, 12))  # how such prompts begin


def make_failing_roles(parts: RoleParts) -> RoleSet:
    assert isinstance(parts.engine, TandemEngine)
    runner = parts.engine._runner
    step, launch, layer_done = parts.engine.step, runner.launch, runner._layer_done
    fault, steps = Path(parts.launch.run_dir) / FAULT_FILE, count()

    def failing_step() -> StepResult:
        if fault.exists() and next(steps) == int(fault.read_text()):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return step()

    def failing_launch(given: StepInput) -> Launched | None:
        begins = [list(sequence.token_ids[:5]) for sequence in given.sequences if sequence.start == 0]
        if KILLS in begins:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISES in begins:
            raise IndexError("no row for this token")
        while HANGS in begins:
            time.sleep(1.0)
        runner._layer_done = slow_layer_done if CRAWLS in begins else layer_done  # type: ignore[method-assign]
        return launch(given)

    def slow_layer_done(reported: frozenset[int], layer: int) -> None:
        time.sleep(1.0)
        layer_done(reported, layer)

    parts.engine.step = failing_step  # type: ignore[method-assign]
    runner.launch = failing_launch  # type: ignore[assignment, method-assign]
    roles = make_roles(parts)
    on_frame = roles.on_frame

    def failing_on_frame(session: int, frame: worker_pb2.RouterFrame) -> None:
        on_frame(session, frame)
        if list(frame.generate.work.prompt[:5]) == BREAKS:
            raise KeyError("a bug")

    roles.on_frame = failing_on_frame  # type: ignore[method-assign]
    return roles


if __name__ == "__main__":
    main(make_failing_roles, "A rank that fails.")
