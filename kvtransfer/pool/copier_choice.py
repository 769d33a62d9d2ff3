"""Chooses what copies and digests pieces on a GPU: Triton's kernel if it is there and right, else torch.

    python -m kvtransfer.pool.copier_choice DEVICE LAYOUT

A kernel that faults makes its process's device unusable, so it first runs in a short-lived process, which this command
starts as. It ends with 0 if the kernel is right, else says on stderr what is wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeAlias

import torch

from kvtransfer.pool.copier_check import copier_error
from kvtransfer.pool.piece_copier import AnyCopier
from tandem.kvcache.layout import KvPoolLayout

log = logging.getLogger(__name__)

CHECK_LIMIT_S = 60.0  # it imports torch, makes a context and compiles: about 10 s
_KILL_GRACE_S = 5.0  # a process in the driver may not even end by a kill

Check: TypeAlias = Callable[[KvPoolLayout, torch.device], str | None]


def error_apart(layout: KvPoolLayout, device: torch.device) -> str | None:
    """What the kernel does wrong in another process; None if nothing. What it compiles stays in Triton's cache."""
    arguments = (str(device), json.dumps(asdict(layout)))
    return error_of((sys.executable, "-m", __name__, *arguments), CHECK_LIMIT_S)


def choose_copier(layout: KvPoolLayout, device: torch.device, check_apart: Check = error_apart) -> AnyCopier | None:
    """None: torch's operations. Takes seconds, and compiles for this layout.

    Uses the device on the current stream, if the check in another process went well.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    wrong = check_apart(layout, device)
    if wrong is None:
        try:
            copier = _make(device)
            wrong = copier_error(copier, layout, device)
        except Exception as error:  # no memory, perhaps
            wrong = _in_a_line(error)
        else:
            if wrong is None:
                return copier
    log.warning("copying KV blocks by torch's operations, more slowly than by Triton: %s", wrong)
    return None


def error_of(command: Sequence[str], limit_s: float) -> str | None:
    """Why a command did not end well in time; None if it did."""
    with tempfile.TemporaryFile() as said:  # a pipe would stay open as long as what the command started
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, process_group=0)
        except OSError as error:
            return f"its check did not start: {error}"
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_GRACE_S)
            return f"its check did not end within {limit_s:g} s"
        if code == 0:
            return None
        said.seek(0)
        lines = said.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "without a word")
        return f"its check ended with {code}: {last[:500]}"


def _make(device: torch.device) -> AnyCopier:
    module = importlib.import_module("kvtransfer.pool.triton_copy")  # imports Triton, which CPU machines lack
    copier: AnyCopier = module.TritonCopier(device)
    return copier


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def main(device_name: str, layout_json: str) -> str | None:
    """What is wrong, as `sys.exit` takes it."""
    signal.alarm(int(CHECK_LIMIT_S))  # ends this process even if the agent, which would, has ended
    device = torch.device(device_name)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return copier_error(_make(device), KvPoolLayout(**json.loads(layout_json)), device)
    except Exception as error:  # not available: no compiler, no cache folder, or an old driver; or a fault
        return _in_a_line(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
