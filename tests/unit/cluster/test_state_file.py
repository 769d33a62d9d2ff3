"""Running clusters are found; dead ones are forgotten."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import state_file
from tandem.errors import ConfigError, UnavailableError


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def mine(name: str = "tandem") -> state_file.ClusterState:
    return replace(state_file.of_this_process(name), admin="a:1", http="h:2", grpc="g:3", is_ready=True)


def test_a_running_cluster_is_found_and_refuses_a_second() -> None:
    with state_file.written(mine()):
        assert state_file.find(None).admin == "a:1"
        with pytest.raises(ConfigError, match=str(os.getpid())):
            state_file.refuse_second("tandem")
        state_file.refuse_second("another")
    with pytest.raises(ConfigError, match="tandem up"):
        state_file.find(None)


def test_a_cluster_that_starts_is_told_apart_from_none() -> None:
    with state_file.written(state_file.of_this_process("newcomer")):
        for name in (None, "newcomer"):
            with pytest.raises(UnavailableError, match="newcomer is still starting"):
                state_file.find(name)
        with pytest.raises(ConfigError, match="'newcomer' is starting"):
            state_file.refuse_second("newcomer")
        state_file.write(replace(mine("newcomer"), is_ready=False))
        assert state_file.find(None).admin == "a:1", "its status can be seen before it is ready"
        with pytest.raises(ConfigError, match="'newcomer' is starting"):
            state_file.refuse_second("newcomer")


def test_a_name_that_no_cluster_has_is_answered_with_those_there_are() -> None:
    with (
        state_file.written(mine("newcomer")),
        pytest.raises(ConfigError, match="expected a running cluster, got 'nope'; running: newcomer"),
    ):
        state_file.find("nope")


def test_what_a_dead_process_left_is_forgotten() -> None:
    with state_file.written(replace(mine(), started="another")):  # the pid now belongs to another process
        assert state_file.read("tandem") is None
        assert not (state_file.state_dir() / "tandem.json").exists()


def test_a_cluster_of_another_host_is_left_alone_and_not_found_here() -> None:
    """It is in a home folder that hosts or containers share; its pid says nothing here."""
    elsewhere = replace(mine(), host="another pid:[4026531836]")
    with state_file.written(elsewhere):
        assert not elsewhere.is_alive
        assert state_file.read("tandem") is None
        with pytest.raises(ConfigError, match="no cluster is running on this machine"):
            state_file.find(None)
        assert (state_file.state_dir() / "tandem.json").exists()


def test_what_ran_here_before_a_reboot_is_forgotten() -> None:
    _, ticks = mine().started.split(":")
    with state_file.written(replace(mine(), started=f"another-boot:{ticks}")):
        assert state_file.read("tandem") is None
        assert not (state_file.state_dir() / "tandem.json").exists()


def test_a_file_of_an_earlier_release_has_no_host() -> None:
    with state_file.written(mine()):
        path = state_file.state_dir() / "tandem.json"
        fields = json.loads(path.read_text())
        del fields["host"]
        path.write_text(json.dumps(fields))
        assert state_file.find(None).admin == "a:1"
        path.write_text(json.dumps(fields | {"started": "another"}))
        assert state_file.read("tandem") is None
        assert not path.exists()


def test_a_file_that_another_process_wrote_stays() -> None:
    successor = replace(mine(), pid=os.getppid(), started=state_file.start_of(os.getppid()))
    with state_file.written(mine()):
        state_file.write(successor)
    assert state_file.read("tandem") == successor


def test_a_broken_file_is_forgotten() -> None:
    state_file.state_dir().mkdir(parents=True)
    (state_file.state_dir() / "tandem.json").write_text("{")
    assert state_file.read("tandem") is None


def test_with_several_clusters_one_must_be_named() -> None:
    with state_file.written(mine("a")), state_file.written(mine("b")):
        with pytest.raises(ConfigError, match="a, b"):
            state_file.find(None)
        assert state_file.find("b").name == "b"


def test_a_process_that_ended_is_not_alive_before_it_is_reaped() -> None:
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    started = state_file.start_of(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not replace(mine(), pid=child.pid, started=started).is_alive
    child.wait()
    assert not replace(mine(), pid=child.pid, started=started).is_alive


@pytest.mark.acceptance(12, here="finding a cluster")
def test_a_start_is_told_by_the_clock_that_nobody_sets() -> None:
    """Ticks since boot: with wall-clock times, a step of five seconds hid running clusters."""
    boot, ticks = state_file.start_of(os.getpid()).split(":")
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert 0 < since_boot_s < 24 * 3600


@pytest.mark.parametrize("what", ["written", "logs"])
def test_a_folder_that_cannot_be_written_is_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"XDG_STATE_HOME: cannot write to .* \(Not a directory\): free space"):
        state_file.new_log_dir("tandem") if what == "logs" else state_file.written(mine()).__enter__()


def test_logs_of_running_clusters_are_kept_however_old() -> None:
    logs = state_file.state_dir() / "logs"
    running, ended = logs / f"long-{os.getppid()}", [logs / f"short-{(1 << 22) + number}" for number in range(15)]
    for age_s, folder in enumerate([*reversed(ended), running]):
        folder.mkdir(parents=True)
        os.utime(folder, (1000 - age_s, 1000 - age_s))
    state_file.new_log_dir("tandem")
    assert {each.name for each in logs.iterdir()} == {running.name, *(each.name for each in ended[-10:])}


def test_a_full_disk_is_named_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"), state_file.written(mine()):
        pytest.fail("it was written")
    assert list(state_file.state_dir().iterdir()) == []
