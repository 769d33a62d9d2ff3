"""Runs one member's processes: starts them, restarts those that may be restarted, and leaves none behind.

Every child dies with its supervisor (PR_SET_PDEATHSIG), even when that is killed. The signal is tied to the thread that
forked, so children are started from the event loop's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.processes import MemberStart, ProcessSpec, RunningProcess

PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 5.0
RESTART_DELAY_S = 0.2
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with(parent_pid: int) -> Callable[[], None]:
    def set_signal() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent died between fork and prctl
            os._exit(1)

    return set_signal


class Supervisor:
    """One member. `start`, `wait_end` and `stop` may follow one another any number of times."""

    def __init__(self, name: str, log_dir: Path) -> None:
        self._name = name
        self._log_dir = log_dir
        self._run_dir: Path | None = None
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] | None = None

    async def start(self, start: MemberStart) -> None:
        self._run_dir = Path(start.run_dir)
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in start.files.items():
            _write_private(self._run_dir / name, content)
        self._ended = asyncio.get_running_loop().create_future()
        for spec in start.processes:
            await self._spawn(spec)
            self._watchers.append(asyncio.create_task(self._watch(spec)))

    async def wait_end(self) -> str:
        if self._ended is None:
            return f"{self._name} was not started"
        return await asyncio.shield(self._ended)

    def processes(self) -> tuple[RunningProcess, ...]:
        return tuple(
            RunningProcess(name=name, pid=child.pid)
            for name, child in self._children.items()
            if child.returncode is None
        )

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        await asyncio.gather(*(_end(child, grace_s) for child in self._children.values()))
        self._children.clear()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    async def _spawn(self, spec: ProcessSpec) -> None:
        # PYTHONPATH is left alone: the packages are installed, or the folder is the repository itself.
        with (self._log_dir / f"{self._name}.{spec.name}.log").open("ab") as log:
            self._children[spec.name] = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | spec.env,
                start_new_session=True,  # a terminal's Ctrl-C is the controller's to handle
                preexec_fn=_die_with(os.getpid()),
            )

    async def _watch(self, spec: ProcessSpec) -> None:
        while True:
            code = await self._children[spec.name].wait()
            if not spec.restart:
                break
            await asyncio.sleep(RESTART_DELAY_S)
            await self._spawn(spec)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(f"{self._name}/{spec.name} {_how(code)}{self._last_words(spec.name)}")

    def _last_words(self, process: str) -> str:
        """The last line of its log that says something."""
        with contextlib.suppress(OSError):
            lines = (self._log_dir / f"{self._name}.{process}.log").read_text(errors="replace").splitlines()
            for line in reversed(lines[-20:]):
                if line.strip():
                    return f": {line.strip()[:400]}"
        return ""


async def _end(child: asyncio.subprocess.Process, grace_s: float) -> None:
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), grace_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _write_private(path: Path, content: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of one of our own modules, in this interpreter."""
    return (sys.executable, "-m", module, *arguments)
