"""Logs on standard output: line by line, with the process's name, whatever reads them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.keeper import lossy_output
from cluster.keeper.line_relay import MAX_LINE_CHARS, LineRelay, named
from cluster.keeper.lossy_output import LossyOutput, container_output
from cluster.keeper.members import MemberStart, ProcessSpec
from cluster.keeper.supervisor import Supervisor
from tandem.config.spec import ClusterSpec
from tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tests.unit.cluster.test_interrupt import start_up


@dataclass
class Pipe:
    """The standard output of a container: nothing reads it until `lines`."""

    reader: int
    writer: int
    output: LossyOutput = field(init=False)

    def __post_init__(self) -> None:
        self.output = LossyOutput(self.writer, "utf-8", kept_bytes=200_000)

    def lines(self) -> list[str]:
        """All, to the end of the output."""
        found: list[str] = []
        with os.fdopen(self.reader, encoding="utf-8") as read:
            reading = threading.Thread(target=lambda: found.extend(read))
            reading.start()
            self.output.finish(timeout_s=30)
            os.close(self.writer)
            reading.join(30)
        self.reader = -1
        return found


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(*os.pipe())
    yield made
    if made.reader >= 0:
        made.lines()


def member(folder: Path, **scripts: str) -> MemberStart:
    processes = tuple(ProcessSpec(name=name, argv=(sys.executable, "-c", text)) for name, text in scripts.items())
    return MemberStart(run_dir=str(folder / "run"), files={}, processes=processes)


async def ended(supervisor: Supervisor, start: MemberStart) -> str:
    async with asyncio.timeout(60):
        await supervisor.start(start)
        reason = (await supervisor.wait_end()).reason
        await supervisor.stop()
    return reason


async def test_lines_have_the_name_of_their_process_and_json_stays_json(tmp_path: Path, pipe: Pipe) -> None:
    script = (
        "import sys; print('{\"level\": \"info\"}'); print('text {'); print('{broken}'); print('{}'); "
        "print('é' * 3, file=sys.stderr); sys.stderr.write('without an end'); sys.stderr.flush()"
    )
    reason = await ended(Supervisor("router-0", tmp_path / "logs", pipe.output), member(tmp_path, router=script))
    lines = [line.rstrip("\n") for line in pipe.lines()]
    assert {json.loads(line)["log"] for line in lines if '"level"' in line} == {"router-0.router"}
    texts = ("text {", "{broken}", "{}", "ééé", "without an end")
    assert sorted(line for line in lines if '"level"' not in line) == sorted(f"router-0.router: {t}" for t in texts)
    assert reason.startswith("router-0/router ended with exit code 0")
    assert not (tmp_path / "logs").exists(), "no file"


async def test_the_last_line_is_the_reason_as_with_files(tmp_path: Path, pipe: Pipe) -> None:
    dying = "import sys; print('x' * 100_000); print('no room at all', file=sys.stderr); sys.exit(3)"
    reason = await ended(Supervisor("m", tmp_path, pipe.output), member(tmp_path, rank=dying))
    assert reason == "m/rank ended with exit code 3: no room at all"
    quiet = "import os; os.kill(os.getpid(), 9)"
    reason = await ended(Supervisor("n", tmp_path, pipe.output), member(tmp_path, rank=quiet))
    assert reason == "n/rank was killed by SIGKILL; its log: standard output"


async def test_a_long_line_is_cut_and_ends_of_lines_are_kept(tmp_path: Path, pipe: Pipe) -> None:
    script = f"print('x' * {MAX_LINE_CHARS + 10}); print('next')"
    await ended(Supervisor("m", tmp_path, pipe.output), member(tmp_path, rank=script))
    found = pipe.lines()
    assert [len(line) for line in found] == [len("m.rank: \n") + size for size in (MAX_LINE_CHARS, 10, 4)]


async def test_an_output_that_is_not_read_stops_no_process(tmp_path: Path, pipe: Pipe) -> None:
    """Ten megabytes into a pipe of 64 KiB, in memory of 200 kB."""
    script = "for n in range(100_000): print(n, 'x' * 90)"
    reason = await ended(Supervisor("m", tmp_path, pipe.output), member(tmp_path, rank=script))
    assert reason.startswith("m/rank ended with exit code 0")
    lines = pipe.lines()
    notes = [line for line in lines if "dropped" in line]
    assert sum(int(note.split()[0]) for note in notes) + len(lines) - len(notes) == 100_000
    assert lines[0].startswith("m.rank: 0 x")
    assert sum(map(len, lines)) < 600_000


async def test_a_restart_in_place_goes_on_with_the_same_name(tmp_path: Path, pipe: Pipe) -> None:
    said = tmp_path / "said"
    script = f"import os, time; print(os.getpid(), flush=True); open({str(said)!r}, 'a').write('x'); time.sleep(600)"
    supervisor = Supervisor("m", tmp_path, pipe.output)
    spec = ProcessSpec(name="agent", argv=(sys.executable, "-c", script), restart=True)
    await supervisor.start(MemberStart(run_dir=str(tmp_path / "run"), files={}, processes=(spec,)))
    (before,) = supervisor.processes()
    await until(lambda: said.exists() and said.stat().st_size == 1)
    os.kill(before.pid, signal.SIGKILL)
    await until(lambda: said.stat().st_size == 2)
    (now,) = supervisor.processes()
    await supervisor.stop()
    assert pipe.lines() == [f"m.agent: {before.pid}\n", f"m.agent: {now.pid}\n"]


def test_a_line_without_an_end_takes_no_more_memory_than_a_long_one(pipe: Pipe) -> None:
    relay = LineRelay("m.rank", pipe.output)
    for data in (b"x" * (MAX_LINE_CHARS + 1), b"\n", b"x" * (MAX_LINE_CHARS + 1), b"yz\n", b"\n"):
        relay.data_received(data)
    long = ["m.rank: " + "x" * MAX_LINE_CHARS + "\n", "m.rank: x\n"]
    assert pipe.lines() == [*long, *long, "m.rank: yz\n", "m.rank: \n"]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


def test_a_field_of_that_name_is_not_doubled() -> None:
    assert named("m.rank", '{"log": "own"}') == '{"log": "own"}'


def test_the_output_of_the_container_is_that_of_its_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(lossy_output, "CONTAINER_STDOUT", f"/proc/self/fd/{writer}")
    output = container_output()
    assert output is not None
    output.write("from a node\n")
    output.finish()
    assert os.read(reader, 100) == b"from a node\n"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("what", ["/dev/null", "a file", "missing"])
def test_what_is_no_output_of_a_container_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = Path(what) if what.startswith("/") else tmp_path / what
    if what == "a file":
        path.touch()
    monkeypatch.setattr(lossy_output, "CONTAINER_STDOUT", str(path))
    assert container_output() is None


def test_an_audit_log_on_stdout_is_refused_where_stdout_is_a_file() -> None:
    spec = {"security": {"auth": {"audit_log": "stdout"}}}
    with pytest.raises(ValueError, match=r"audit_log: expected a file, or stdout together with .*logs.target: stdout"):
        ClusterSpec.model_validate(spec)
    ClusterSpec.model_validate(spec | {"observability": {"logs": {"target": "stdout"}}})


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_tandem_up_prints_the_lines_of_all_processes_and_the_audit_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    settings = {
        "OBSERVABILITY__LOGS__TARGET": "stdout",
        "OBSERVABILITY__LOGS__FORMAT": log_format,
        "SECURITY__AUTH__AUDIT_LOG": "stdout",
        "REDIS__MODE": "none",
        "ROUTER__DRAIN_TIMEOUT_S": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    lines: list[str] = []
    with start_up(tmp_path) as process:
        assert process.stdout is not None
        read = read_until(process, lines)
        read(lambda line: "ready in" in line)
        (state,) = (tmp_path / "state" / "tandem").glob("*.json")
        url = f"http://{json.loads(state.read_text())['http']}"
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 200
        read(lambda line: '"method":"GET /v1/models"' in line)
        audit = json.loads(lines[-1])
        assert (audit["log"], audit["outcome"]) == ("router-0.router", "ok")
        with grpc.insecure_channel(json.loads(state.read_text())["admin"]) as channel:
            cluster_pb2_grpc.ClusterStub(channel).Shutdown(cluster_pb2.ShutdownRequest(), timeout=60)
        lines += process.stdout.readlines()
        assert process.wait(90) == 0
    (shutdown,) = (json.loads(line) for line in lines if '"method":"/tandem.v1.Cluster/Shutdown"' in line)
    assert (shutdown["log"], shutdown["key_id"], shutdown["outcome"]) == ("controller.controller", "local", "ok")
    assert not list((tmp_path / "state").rglob("*.log"))
    assert any(re.search(r"logs +here", line) for line in lines)
    if log_format == "json":
        names = {json.loads(line)["log"] for line in lines if line.startswith('{"log"')}
    else:
        names = {line.partition(": ")[0] for line in lines if re.match(r"[\w.-]+: \d{4}-", line)} | {audit["log"]}
    assert names >= {"router-0.router", "decode-0.0.rank-0", "prefill-0.0.rank-0"}, names


def read_until(process: subprocess.Popen[str], lines: list[str]) -> Callable[[Callable[[str], bool]], None]:
    def read(is_last: Callable[[str], bool]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if is_last(line):
                return
        raise AssertionError("".join(lines[-50:]))

    return read
