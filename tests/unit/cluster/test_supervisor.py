"""A member's processes: restarted or ending it, as their spec says, and never left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.keeper import supervisor as supervisor_module
from cluster.keeper.members import MemberStart, ProcessSpec
from cluster.keeper.supervisor import Supervisor, bound_log
from tandem.config.log_format import LogFormat
from tandem.testing.processes import command_lines

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def member(folder: Path, *processes: ProcessSpec) -> MemberStart:
    return MemberStart(run_dir=str(folder / "run"), files={"secret": "x"}, processes=processes)


def pid_of(supervisor: Supervisor, name: str) -> int:
    return next(process.pid for process in supervisor.processes() if process.name == name)


async def test_a_killed_process_is_restarted_in_place(tmp_path: Path) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    agent = ProcessSpec(name="agent", argv=SLEEP, restart=True)
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=SLEEP), agent))
    rank, before = pid_of(supervisor, "rank"), pid_of(supervisor, "agent")
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(60):
        while not any(p.name == "agent" and p.pid != before for p in supervisor.processes()):
            await asyncio.sleep(0.02)
    assert pid_of(supervisor, "rank") == rank
    await supervisor.stop()


async def test_any_other_end_is_the_members_and_carries_its_last_log_line(tmp_path: Path) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    dying = (sys.executable, "-c", "import sys; print('no room at all', file=sys.stderr); sys.exit(3)")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=dying)))
    async with asyncio.timeout(60):
        reason = (await supervisor.wait_end()).reason
    assert "m/rank ended with exit code 3: no room at all" in reason
    await supervisor.stop()


@pytest.mark.parametrize(("long", "cut"), [(" words" * 200, " words …"), (" 1,2,3" + ",4" * 400, ",4,4 …")])
@pytest.mark.parametrize("log_format", LogFormat)
async def test_an_error_that_a_process_tells_is_told_without_its_time_and_not_cut_in_a_word(
    tmp_path: Path, log_format: LogFormat, long: str, cut: str
) -> None:
    code = (
        "import logging, sys; from tandem.config.log_format import LogFormat; "
        "from tandem.telemetry.logs import setup_logging; "
        f"setup_logging(process='m/rank', log_format=LogFormat('{log_format}')); "
        f"logging.error('error: %s', 'engine.vllm.enforce: no such setting{long}'); sys.exit(78)"
    )
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=(sys.executable, "-c", code))))
    async with asyncio.timeout(60):
        end = await supervisor.wait_end()
    assert end.exit_code == 78
    assert end.reason.startswith("m/rank ended with exit code 78: engine.vllm.enforce: no such setting ")
    assert end.reason.endswith(cut)
    await supervisor.stop()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40"), (63, "signal 63")])
async def test_every_signal_that_ends_it_is_seen(tmp_path: Path, number: int, name: str) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=SLEEP)))
    os.kill(pid_of(supervisor, "rank"), number)
    async with asyncio.timeout(60):
        assert (await supervisor.wait_end()).reason.startswith(f"m/rank was killed by {name}")
    await supervisor.stop()


async def test_a_watch_that_fails_ends_the_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: int) -> str:
        raise LookupError("no text")

    monkeypatch.setattr(supervisor_module, "_exit_text", fail)
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=SLEEP)))
    os.kill(pid_of(supervisor, "rank"), signal.SIGKILL)
    async with asyncio.timeout(60):
        assert (await supervisor.wait_end()).reason == "m/rank could not be watched: LookupError: no text"
    await supervisor.stop()


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a full disk, or a full table of processes."""
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="redis", argv=SLEEP, restart=True)))
    before, spawn, failures = pid_of(supervisor, "redis"), asyncio.create_subprocess_exec, 2

    async def spawned(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await spawn(*argv, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawned)
    monkeypatch.setattr(supervisor_module, "RESTART_DELAY_S", 0.01)
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(60):
        while not any(process.pid != before for process in supervisor.processes()):
            await asyncio.sleep(0.02)
    assert (failures, supervisor.end) == (-1, None)
    await supervisor.stop()


@pytest.mark.parametrize("log_format", LogFormat)
@pytest.mark.parametrize(("level", "is_told"), [("info", False), ("warning", True), ("error", True)])
async def test_a_line_that_is_not_why_it_ended_is_not_told_as_the_reason(
    tmp_path: Path, log_format: LogFormat, level: str, is_told: bool
) -> None:
    script = (
        "import logging, os; from tandem.config.log_format import LogFormat; "
        "from tandem.telemetry.logs import setup_logging; "
        f"setup_logging(process='rank-0', log_format=LogFormat({log_format.value!r})); "
        f"logging.{level}('ready: 65536 KV blocks'); os.kill(os.getpid(), 9)"
    )
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=(sys.executable, "-c", script))))
    async with asyncio.timeout(60):
        reason = (await supervisor.wait_end()).reason
    assert reason.startswith("m/rank was killed by SIGKILL")
    assert ("65536" in reason) == is_told
    assert reason.endswith(f"; its log: {tmp_path / 'logs' / 'm.rank.log'}") == (not is_told)
    await supervisor.stop()


async def test_a_log_is_bounded_and_goes_on_at_its_new_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "LOG_BYTES", 20_000)
    monkeypatch.setattr(supervisor_module, "LOG_CHECK_S", 0.02)
    script = "import itertools, time; [(print(n, 'x' * 90, flush=True), time.sleep(0.0002)) for n in itertools.count()]"
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=(sys.executable, "-c", script))))
    path, older = tmp_path / "logs" / "m.rank.log", tmp_path / "logs" / "m.rank.log.1"
    async with asyncio.timeout(60):
        while not (older.exists() and older.stat().st_size > 20_000):
            await asyncio.sleep(0.01)
        while not 0 < path.stat().st_size < 20_000:
            await asyncio.sleep(0.001)
    await supervisor.stop()
    assert path.read_bytes()[:1] != b"\0", "the process must append"


def test_a_log_on_a_full_disk_is_bounded_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisor_module, "LOG_BYTES", 10)
    monkeypatch.setattr(shutil, "copyfile", fail)
    path = tmp_path / "log"
    path.write_text("x" * 11)
    bound_log(path)
    assert path.stat().st_size == 0
    bound_log(tmp_path / "none")  # says so in the log


async def test_what_cannot_be_started_is_an_end_too(tmp_path: Path) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=("/no/such/program",))))
    async with asyncio.timeout(60):
        assert "No such file" in (await supervisor.wait_end()).reason
    await supervisor.stop()


async def test_stopping_leaves_nothing_and_it_can_start_again(tmp_path: Path) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    for _ in range(2):
        await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=SLEEP)))
        assert (tmp_path / "run" / "secret").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        pid = pid_of(supervisor, "rank")
        await supervisor.stop()
        assert not psutil.pid_exists(pid)
        assert not (tmp_path / "run").exists()


async def test_a_process_has_its_own_time_to_end(tmp_path: Path) -> None:
    supervisor = Supervisor("m", tmp_path / "logs")
    stubborn = (sys.executable, "-c", "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(60)")
    await supervisor.start(member(tmp_path, ProcessSpec(name="rank", argv=stubborn, stop_grace_s=0.3)))
    async with asyncio.timeout(60):
        while not (tmp_path / "logs" / "m.rank.log").read_text():
            await asyncio.sleep(0.02)
    started_s = asyncio.get_running_loop().time()
    await supervisor.stop()
    assert 0.3 <= asyncio.get_running_loop().time() - started_s < 5.0, "the usual time"


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, pathlib, sys
        from cluster.keeper.members import MemberStart, ProcessSpec
        from cluster.keeper.supervisor import Supervisor

        async def main():
            supervisor = Supervisor("m", pathlib.Path({str(tmp_path / "logs")!r}))
            spec = ProcessSpec(name="rank", argv=(sys.executable, "-c", "import time; time.sleep(600)"))
            await supervisor.start(MemberStart(run_dir={str(tmp_path / "run")!r}, files={{}}, processes=(spec,)))
            print(supervisor.processes()[0].pid, flush=True)
            await supervisor.wait_end()

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
    deadline = time.monotonic() + 60
    while command_lines([child]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
