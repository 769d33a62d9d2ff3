"""Runs one member's processes: starts them, restarts those with `restart`, and leaves none behind.

Every child dies with its supervisor (PR_SET_PDEATHSIG), even if that is killed. The kernel sends the signal when the
thread that forked ends, so the event loop's thread starts the children.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster.devices import CPU
from cluster.keeper.line_relay import LineRelay
from cluster.keeper.lossy_output import LossyOutput
from cluster.keeper.members import MemberEnd, MemberStart, ProcessSpec, RunningProcess
from tandem.files import replace_file
from tandem.telemetry.logs import error_told
from tandem.telemetry.resource_watch import shortage

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 5.0
STABLE_S = 10.0  # a process that ran for so long restarts with the shortest delay
TAIL_BYTES = 4096
LOG_BYTES = 64 << 20  # a log has at most this, and the file before it
LOG_CHECK_S = 5.0
LONGEST_HINT = 600
LAST_LINES_S = 1.0  # for what a process that has ended left in its pipe
# A log line of tandem.telemetry.logs below warning, as text or JSON. Any other line may be the end of a traceback.
_HARMLESS = re.compile(r'\S+ (info|debug) |\{"time": "[^"]*", "level": "(info|debug)"')
_CODE = Path(__file__).resolve().parents[2]  # the folder of the packages: the repository or site-packages

# Run by a bare interpreter before it executes the program: code in a forked copy of a process with many threads, such
# as gRPC's, is not safe.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); "  # the parent may have died before prctl
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


class Supervisor:
    """One member. `start`, `wait_end` and `stop` may follow one another any number of times.

    `output` gets the lines of its processes; None: each process has a file in `log_dir`.
    """

    def __init__(self, name: str, log_dir: Path, output: LossyOutput | None = None) -> None:
        self._name = name
        self._log_dir = log_dir
        self._output = output
        self._relays: dict[str, LineRelay] = {}
        self._run_dir: Path | None = None
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._grace_s: dict[str, float] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[MemberEnd] | None = None
        self._device = CPU

    async def start(self, start: MemberStart, device: str = CPU) -> None:
        """`device`: the member's, for processes with `on_device`. If a process cannot start, `wait_end` returns the
        reason."""
        self._run_dir = Path(start.run_dir)
        self._device = device
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._output is None:
                self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, content in start.files.items():
                # Whole, because the ranks of a worker share the folder.
                replace_file(self._run_dir / name, content.encode(), is_durable=False)
            for spec in start.processes:
                await self._spawn(spec)
                self._watchers.append(asyncio.create_task(self._watch(spec)))
            if self._output is None:
                logs = [self._log_of(spec.name) for spec in start.processes]
                self._watchers.append(asyncio.create_task(_bound_all(logs)))
        except OSError as error:
            self._end(f"{self._name} could not be started: {shortage(error)}")

    async def wait_end(self) -> MemberEnd:
        if self._ended is None:
            return MemberEnd(reason=f"{self._name} was not started")
        return await asyncio.shield(self._ended)

    @property
    def end(self) -> MemberEnd | None:
        """Why the member ended; None: it runs."""
        return self._ended.result() if self._ended is not None and self._ended.done() else None

    def processes(self) -> tuple[RunningProcess, ...]:
        return tuple(
            RunningProcess(name=name, pid=child.pid)
            for name, child in self._children.items()
            if child.returncode is None
        )

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        await asyncio.gather(*(_stop(child, self._grace_s[name]) for name, child in self._children.items()))
        self._children.clear()
        for relay in self._relays.values():
            await relay.ended(LAST_LINES_S)
            relay.close()
        self._relays.clear()
        self._end(f"{self._name} was stopped")
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _end(self, reason: str, exit_code: int | None = None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(MemberEnd(reason=reason, exit_code=exit_code))

    async def _spawn(self, spec: ProcessSpec) -> None:
        self._grace_s[spec.name] = spec.stop_grace_s
        argv = (*spec.argv, "--device", self._device) if spec.on_device else spec.argv
        log_file = await self._open_log(spec.name)
        try:
            self._children[spec.name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=os.environ | _python_path() | spec.env,
                start_new_session=True,  # a terminal's Ctrl-C is the controller's to handle
            )
        finally:
            os.close(log_file)

    async def _open_log(self, process: str) -> int:
        if self._output is None:
            return os.open(self._log_of(process), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        relay = LineRelay(f"{self._name}.{process}", self._output)
        log_file = await relay.open()
        if (before := self._relays.get(process)) is not None:
            before.close()  # its process has ended, and was waited for
        self._relays[process] = relay
        return log_file

    async def _watch(self, spec: ProcessSpec) -> None:
        """A watch that fails ends the member: else the end of the process would be seen by no one."""
        try:
            code = await (self._restart_for_ever(spec) if spec.restart else self._children[spec.name].wait())
            how = f"{_exit_text(code)}{await self._log_hint(spec.name)}"
            self._end(f"{self._name}/{spec.name} {how}", code if code >= 0 else None)
        except Exception as error:
            log.exception("the watch of %s/%s failed", self._name, spec.name)
            self._end(f"{self._name}/{spec.name} could not be watched: {type(error).__name__}: {error}")

    async def _restart_for_ever(self, spec: ProcessSpec) -> NoReturn:
        loop = asyncio.get_running_loop()
        delay_s = RESTART_DELAY_S
        while True:
            started_s = loop.time()
            how = _exit_text(await self._children[spec.name].wait())
            if (relay := self._relays.get(spec.name)) is not None:
                await relay.ended(LAST_LINES_S)
            log.warning("%s/%s %s; restarting it", self._name, spec.name, how)
            delay_s = RESTART_DELAY_S if loop.time() - started_s >= STABLE_S else _longer(delay_s)
            await asyncio.sleep(delay_s)
            while not await self._respawned(spec):
                delay_s = _longer(delay_s)
                await asyncio.sleep(delay_s)

    async def _respawned(self, spec: ProcessSpec) -> bool:
        """False on an error that may pass: a full disk or table of processes."""
        try:
            await self._spawn(spec)
        except OSError as error:
            log.warning("%s/%s cannot be restarted yet: %s", self._name, spec.name, shortage(error))
            return False
        return True

    def _log_of(self, process: str) -> Path:
        return self._log_dir / f"{self._name}.{process}.log"

    async def _log_hint(self, process: str) -> str:
        """The log's last line if it may be the reason of the end; otherwise the log's path."""
        last, where = "", "standard output"
        if (relay := self._relays.get(process)) is not None:
            await relay.ended(LAST_LINES_S)
            last = relay.last_line
        elif self._output is None:
            path = self._log_of(process)
            last, where = _last_line(path), str(path)
        if not last or _HARMLESS.match(last):
            return f"; its log: {where}"
        return f": {_cut(error_told(last) or last)}"


def _cut(text: str) -> str:
    """At most LONGEST_HINT characters, between two words if some of the last ones are short."""
    if len(text) <= LONGEST_HINT:
        return text
    whole = text[:LONGEST_HINT].rpartition(" ")[0]
    return f"{whole if len(whole) > LONGEST_HINT // 2 else text[:LONGEST_HINT]} …"


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""
    return ""


async def _stop(child: asyncio.subprocess.Process, grace_s: float) -> None:
    """Sends SIGTERM to the process group, and SIGKILL after `grace_s`."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def _bound_all(logs: Sequence[Path]) -> None:
    while True:
        await asyncio.sleep(LOG_CHECK_S)
        for path in logs:
            await asyncio.to_thread(bound_log, path)


def bound_log(path: Path) -> None:
    """Moves the content of a log of more than LOG_BYTES to PATH.1, in place of what is there. On a full disk, deletes
    it. The process appends, so it goes on at the new end."""
    try:
        if path.stat().st_size <= LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            shutil.copyfile(path, f"{path}.1")
        os.truncate(path, 0)
    except Exception as error:  # else no log of this member would be bounded any more
        log.warning("cannot bound the log %s: %s", path, error)


def _longer(delay_s: float) -> float:
    return min(MAX_RESTART_DELAY_S, 2 * delay_s)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal, most of which have no name
        return f"was killed by signal {-code}"


def _python_path() -> dict[str, str]:
    """Adds the packages' folder to PYTHONPATH. Not site-packages: the standard library must come before it."""
    if str(_CODE) in (sysconfig.get_path("purelib"), site.getusersitepackages()):
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{_CODE}{os.pathsep}{before}" if before else str(_CODE)}


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module in this interpreter. -P: never imports from the current folder."""
    return (sys.executable, "-P", "-m", module, *arguments)
