"""The head's start script, running, with stand-ins for `ray` and `tandem` that show what reached them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tandem.config.spec import ClusterSpec

POD_IP = "10.1.2.3"


@pytest.fixture
def head_pod(
    render: Callable[..., dict[tuple[str, str], dict[str, Any]]], tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    data = render()["ConfigMap", "test-tandem"]["data"]
    (tmp_path / "cluster.yaml").write_text(data["cluster.yaml"])
    script = data["start-head.sh"].replace("/etc/tandem", str(tmp_path)).replace("/tmp/tandem", str(tmp_path / "run"))
    script = script.replace("sleep 5", "sleep 0.1")
    programs = {
        "python": f'exec {sys.executable} "$@"',
        "ray": f"case $1 in start) touch {tmp_path}/up; exec sleep 60 ;; *) test -e {tmp_path}/up ;; esac",
        "tandem": f"if [ $1 = apply ]; then cat $2 >>{tmp_path}/applied; echo --- >>{tmp_path}/applied; "
        f"test -e {tmp_path}/ready; else exec {sys.executable} {tmp_path}/tandem.py; fi",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tandem.py").write_text(
        "import pathlib, time\n"
        f"spec = pathlib.Path({str(tmp_path / 'run' / 'cluster.yaml')!r}).read_text()\n"
        "try:\n    print(spec, '---', sep='', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('clean', flush=True)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PATH": path, "POD_IP": POD_IP, "KUBERAY_GEN_RAY_START_CMD": "ray start --head --block"},
    )  # fmt: skip
    with process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def spec_that_reached_tandem(head_pod: subprocess.Popen[str]) -> ClusterSpec:
    assert head_pod.stdout is not None
    lines = list(iter(head_pod.stdout.readline, "---\n"))
    return ClusterSpec.model_validate(yaml.safe_load("".join(lines)))


def test_the_start_script_gives_tandem_the_pods_address_and_a_clean_end(head_pod: subprocess.Popen[str]) -> None:
    assert spec_that_reached_tandem(head_pod).router.http_host == POD_IP
    head_pod.send_signal(signal.SIGINT)
    assert head_pod.wait(60) == 0


def applied(folder: Path, count: int) -> list[ClusterSpec]:
    """The specs of the first `count` calls of `tandem apply`."""
    until_s = time.monotonic() + 60
    found = folder / "applied"
    while not found.exists() or found.read_text().count("---") < count:
        assert time.monotonic() < until_s, "tandem apply was not called"
        time.sleep(0.05)
    return [ClusterSpec.model_validate(yaml.safe_load(text)) for text in found.read_text().split("---\n")[:count]]


def test_a_changed_config_map_is_applied_once_the_cluster_takes_it(
    head_pod: subprocess.Popen[str], tmp_path: Path
) -> None:
    started = spec_that_reached_tandem(head_pod)
    mounted = tmp_path / "cluster.yaml"

    def change(workers: int) -> None:
        spec = yaml.safe_load(mounted.read_text())
        spec["models"][0]["decode"]["workers"] = workers
        (tmp_path / "newer").write_text(yaml.safe_dump(spec))
        (tmp_path / "newer").rename(mounted)

    change(2)
    first, second = applied(tmp_path, 2)  # it still starts, and says no
    assert first == second
    assert (first.models[0].decode.workers, first.router.http_host) == (2, POD_IP)
    assert started.models[0].decode.workers == 1
    (tmp_path / "ready").touch()
    until_s = time.monotonic() + 60
    while (tmp_path / "run" / "applied").read_text() != mounted.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    calls = (tmp_path / "applied").read_text().count("---")
    time.sleep(0.5)
    assert (tmp_path / "applied").read_text().count("---") == calls, "once it was applied, never again"
    change(3)
    assert applied(tmp_path, calls + 1)[-1].models[0].decode.workers == 3


def ray_of(head_pod: subprocess.Popen[str]) -> psutil.Process | None:
    for child in psutil.Process(head_pod.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the script's own short sleeps
            if child.cmdline() == ["sleep", "60"]:
                return child
    return None


def test_the_head_pod_ends_when_ray_does(head_pod: subprocess.Popen[str]) -> None:
    spec_that_reached_tandem(head_pod)
    until_s = time.monotonic() + 60
    while (ray := ray_of(head_pod)) is None:
        assert time.monotonic() < until_s, "ray was not started"
        time.sleep(0.05)
    ray.terminate()
    assert head_pod.wait(60) == 0
