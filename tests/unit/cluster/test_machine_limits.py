"""A machine without open files, disk, memory or shared memory left: refused by name, and found by the doctor."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli.commands import doctor
from cluster.cli.machine_limits import LEAST_FILES, check_disks, check_open_files, check_shared_memory
from cluster.testing.memory_group import MemoryGroup, memory_group
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.testing.models import random_prompt, write_tiny_llama

Usage = namedtuple("Usage", "total used free")  # of shutil.disk_usage


def limit_files(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (min(64, hard), hard))


def test_too_few_open_files_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_files(monkeypatch, LEAST_FILES - 1)
    with pytest.raises(ConfigError, match=r"open files: expected a limit of at least 512 .*, got 511: .*ulimit -n"):
        check_open_files(ClusterSpec())


@pytest.mark.parametrize(
    ("hard", "text"),
    [
        (LEAST_FILES, "a router holds about 256 connections, fewer than router.max_connections allows"),
        (1 << 20, "1048576 for each process"),
        (resource.RLIM_INFINITY, "unlimited"),
    ],
)
def test_enough_open_files_are_told_with_what_they_suffice_for(
    monkeypatch: pytest.MonkeyPatch, hard: int, text: str
) -> None:
    if hard != resource.RLIM_INFINITY:
        limit_files(monkeypatch, hard)
    else:
        monkeypatch.setattr(resource, "getrlimit", lambda what: (64, hard))
    assert text in check_open_files(ClusterSpec())


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_RUNTIME_DIR"])
@pytest.mark.acceptance(24, here="disk, at the start")
def test_a_full_disk_is_refused_by_the_variable_that_moves_the_folder(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    assert "MiB free in" in check_disks()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 1 << (20 if variable in str(path) else 40)))
    with pytest.raises(
        ConfigError, match=rf"{variable}: expected at least 64 MiB free in \S*{variable}\S*, got 1: free"
    ):
        check_disks()


@pytest.mark.acceptance(24, here="descriptors, at the start")
def test_a_start_with_64_open_files_ends_at_once_and_names_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster", "up", "--backend", "subprocess", "--http-port", "0", "--grpc-port", "0"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 64; exec "$@"', "up", *command],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "open files: expected a limit of at least 512 for each process, got 64" in done.stderr


GPUS = {"engine": {"device": "cuda"}, "prefill": {"tp": 2}, "decode": {"workers": 2, "tp": 1}}


@pytest.mark.parametrize(
    ("transport", "ranks"), [("auto", 2), ("nccl", 4)], ids=["ranks of one worker", "workers, too"]
)
@pytest.mark.acceptance(24, here="/dev/shm, at the start")
def test_too_little_shared_memory_for_collectives_is_refused_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, transport: str, ranks: int
) -> None:
    spec = ClusterSpec.model_validate({"models": [GPUS], "transfer": {"transport": transport}})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, (64 * ranks - 1) << 20))
    with pytest.raises(
        ConfigError, match=rf"/dev/shm: .* {64 * ranks} MiB .* {ranks} ranks .* got {64 * ranks - 1}: .*shm-size"
    ):
        check_shared_memory(spec)
    assert "MiB free in /dev/shm" in check_shared_memory(ClusterSpec())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, (64 * ranks) << 20))
    assert check_shared_memory(spec) == f"{64 * ranks} MiB free in /dev/shm"


def test_what_a_start_forks_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    """The soft limit is 64 of a shell, as a service manager or `ulimit -Sn` sets it."""
    script = """
import asyncio, resource, subprocess, sys
from cluster.cli.commands import running
from tandem.config.spec import ClusterSpec

def resolve(*_: object) -> None:
    subprocess.run(["sh", "-c", "ulimit -Sn; ulimit -Hn"], check=True)
    raise SystemExit(3)

running.resolve = resolve
async def start() -> None:
    async with running.running_cluster(ClusterSpec(), print):
        pass

asyncio.run(start())
"""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "up", sys.executable, "-c", script],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    soft, hard = done.stdout.split()
    assert soft == hard, done
    assert hard == str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


SPEC = """
name: little
models: [{source: MODEL, name: tiny, engine: {kv_memory_bytes: 100000000}}]
control: {backend: subprocess, admin_port: 0}
router: {http_port: 0, grpc_port: 0}
"""


@contextmanager
def up(group: MemoryGroup, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "cluster", "up", "--config", str(folder / "cluster.yaml")]
    env = os.environ | {"XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(group.within(command), env=env, stderr=log, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


def prompt_of(number: int) -> dict[str, object]:
    return {"model": "tiny", "prompt": random_prompt(2500, 300, number), "max_tokens": 30, "ignore_eos": True}


async def statuses(base_url: str, count: int) -> Counter[int]:
    """Of so many long prompts at once."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=base_url, timeout=300, limits=limits) as http:
        calls = [http.post("/v1/completions", json=prompt_of(number)) for number in range(count)]
        return Counter(reply.status_code for reply in await asyncio.gather(*calls))


def wait_ready(process: subprocess.Popen[str], folder: Path) -> dict[str, Any] | None:
    """The state that `up` writes once it serves, or None if it refuses to start."""
    deadline_s = time.monotonic() + 120
    state: dict[str, Any] = {}
    while not state.get("is_ready"):
        if process.poll() is not None:
            assert process.returncode == 2, (folder / "up.log").read_text()
            return None
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
        with suppress(FileNotFoundError):
            state = json.loads((folder / "tandem" / "little.json").read_text())
    return state


def asked_mib(group: MemoryGroup, given_mib: int, folder: Path) -> int:
    """What a start in `given_mib` is refused for, with what the command itself uses."""
    group.limit(given_mib << 20)
    with up(group, folder) as process:
        assert process.wait(120) == 2, (folder / "up.log").read_text()
    return told_mib(given_mib, folder)


def told_mib(given_mib: int, folder: Path) -> int:
    said = (folder / "up.log").read_text()
    match = re.search(r"about (\d+) MiB are needed .* and (\d+) MiB are available", said)
    assert match is not None, said
    return int(match[1]) + given_mib - int(match[2])


@pytest.mark.slow
@pytest.mark.acceptance(23, here="100 long prompts at once in what a start asks for, and a start in 20 % less")
def test_with_too_little_memory_nothing_starts_and_with_what_is_asked_for_nothing_is_killed(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", max_positions=4096, layers=4, kv_heads=4)
    (tmp_path / "cluster.yaml").write_text(SPEC.replace("MODEL", str(model)))
    found: Counter[int] = Counter()
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group())
        except OSError as error:
            pytest.skip(f"no control group of its own: {error}")
        asked = asked_mib(group, 300, tmp_path)
        asked_mib(group, asked * 4 // 5, tmp_path)
        for _ in range(3):  # what the kernel counts for the command itself differs from start to start
            given = asked + 8
            group.limit(given << 20)
            with up(group, tmp_path) as process:
                if (state := wait_ready(process, tmp_path)) is not None:
                    found = asyncio.run(statuses(f"http://{state['http']}", 100))
                    assert process.poll() is None
                    break
            asked = told_mib(given, tmp_path)
        assert group.kills == 0
    assert set(found) <= {200, 429, 503}
    assert found[200] > 0, (tmp_path / "up.log").read_text()


def test_doctor_tells_what_pages_of_4_kib_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(doctor, "HUGE_PAGES", setting)
    check = dict(doctor.CHECKS)["huge pages"]
    with pytest.raises(doctor.Unchecked, match="this system has none: decoding in float32 takes up to a third longer"):
        check(ClusterSpec())
    setting.write_text("always madvise [never]\n")
    with pytest.raises(doctor.Unchecked, match=r"off: .* than with madvise in .*enabled"):
        check(ClusterSpec())
    setting.write_text("always [madvise] never\n")
    assert check(ClusterSpec()) == "for weights on CPUs"
