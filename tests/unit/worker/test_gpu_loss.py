"""A GPU that fails ends its rank's process with an exit code of its own; other failures do not."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from tandem.errors import GpuLost
from worker.exit_codes import GPU_LOST_EXIT_CODE
from worker.gpu_loss import lost_gpu


def accelerator_error(text: str, code: int) -> RuntimeError:
    error: RuntimeError = torch.AcceleratorError(text)
    error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error("CUDA error: an illegal memory access was encountered\nmore", 700),
        accelerator_error("CUDA error: uncorrectable ECC error encountered", 214),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
        RuntimeError("No CUDA GPUs are available"),
    ],
)
def test_a_sticky_error_of_the_device_is_its_loss(error: RuntimeError) -> None:
    lost = lost_gpu("cuda:1", error)
    assert isinstance(lost, GpuLost)
    assert lost.message.startswith(f"cuda:1 failed: {str(error).splitlines()[0]}")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        accelerator_error("CUDA error: out of memory", 2),
        torch.distributed.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, remote process exited or "
            "there was a network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network "
            "error or a remote process exiting prematurely."
        ),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError(""),
    ],
)
def test_other_errors_are_not(error: RuntimeError) -> None:
    assert lost_gpu("cuda:1", error) is None


SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from worker.gpu_loss import gpu_loss_ends_process

    try:
        with gpu_loss_ends_process("cuda:1"):
            raise torch.AcceleratorError(sys.argv[1])
    finally:
        print("a shutdown that could hang")
    """
)


def test_the_process_ends_at_once_and_its_last_line_is_the_reason() -> None:
    command = [sys.executable, "-c", SCRIPT, "CUDA error: unspecified launch failure"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (GPU_LOST_EXIT_CODE, "")
    assert "error: cuda:1 failed: CUDA error: unspecified launch failure" in done.stderr.splitlines()[-1]
