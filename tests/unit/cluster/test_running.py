"""`tandem up` as the keeper of controllers: nothing that one of them does or says ends the cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from cluster.cli.commands import running as running_module
from cluster.cli.commands.running import CONTROLLER, Controllers
from cluster.cli.main import app
from cluster.control.launch import ControllerLaunch
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import ResolvedCluster
from router.testing.index import BINARIES
from router.testing.redis_server import TcpServer
from tandem.config.spec import ClusterSpec
from tandem.testing.processes import command_lines
from tests.unit.cluster.test_interrupt import start_up, wait_for

SERVING = """
import asyncio, sys
from pathlib import Path
from cluster.keeper.remote import RemoteKeeper

async def main():
    keeper = await RemoteKeeper.connect(Path(sys.argv[1]))
    await keeper.report("ready", '{"admin": "a:1", "http": ["h:1"], "grpc": ["g:1"]}')
    await keeper.wait_lost()

asyncio.run(main())
"""

Start = Callable[[str, Callable[[str], None]], Controllers]


SERVING_ONCE = f"""
import sys
from pathlib import Path
served = Path(sys.argv[1] + ".served")
served.exists() and sys.exit(3)
served.touch()
{SERVING}
"""


@pytest.fixture
async def start(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[str, Callable[[str], None]], Controllers]]:
    """Makes Controllers whose controllers run this script."""
    made: list[Controllers] = []
    folder = tmp_path_factory.mktemp("k")
    spec = ClusterSpec.model_validate({"control": {"backend": "ray", "ray_address": "10.0.0.1:6379"}})
    launch = ControllerLaunch.of(
        ResolvedCluster(spec, ()),
        SpecSource(spec, {}),
        run_base=folder,
        keeper_dir=folder,
        log_dir=folder / "logs",
        ray_dir=folder,
    )

    def make(script: str, progress: Callable[[str], None]) -> Controllers:
        argv = (sys.executable, "-c", script, launch.keeper_socket)
        monkeypatch.setattr(running_module, "python", lambda module, *arguments: argv)
        made.append(Controllers(launch, progress, lambda addresses: None))
        return made[-1]

    yield make
    for controllers in made:
        await controllers.close()


async def pid_of_controller(controllers: Controllers, before: int = 0) -> int:
    """Of the first one after `before`."""
    async with asyncio.timeout(60):
        while True:
            found = (await controllers.keeper.members()).get(CONTROLLER)
            for process in found.processes if found is not None else ():
                if process.pid != before:
                    return process.pid
            await asyncio.sleep(0.02)


def test_the_process_of_tandem_up_is_small() -> None:
    """The keeper, from its first module to its last."""
    heavy = {"grpc", "google.protobuf", "ray", "torch"}
    code = f"import cluster.cli.commands.up, sys; print(*{heavy}.intersection(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == []


async def test_a_line_that_cannot_be_told_does_not_end_the_cluster(start: Start) -> None:
    def progress(text: str) -> None:
        raise OSError(28, "No space left on device")

    controllers = start(SERVING, progress)
    await controllers.start()
    before = await pid_of_controller(controllers)
    os.kill(before, signal.SIGKILL)
    await pid_of_controller(controllers, before)
    assert not controllers.stopped.is_set()


async def test_a_ray_cluster_that_is_lost_is_named_and_ends_with_a_code_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "MAX_DELAY_S", 0.01)
    monkeypatch.setattr(running_module, "FAILED_TAKEOVERS", 2)
    said: list[str] = []
    controllers = start(SERVING_ONCE, said.append)
    await controllers.start()
    os.kill(await pid_of_controller(controllers), signal.SIGKILL)
    async with asyncio.timeout(60):
        await controllers.stopped.wait()
    assert controllers.exit_code == running_module.RAY_LOST_EXIT_CODE
    assert said[-1] == "the Ray cluster is lost: 2 controllers in a row could not use it"


async def test_a_bug_of_the_keeper_is_no_clean_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    controllers = start(SERVING, lambda text: None)
    await controllers.start()

    def fail(end: object) -> bool:
        raise LookupError("a bug")

    monkeypatch.setattr(controllers, "_is_final", fail)
    os.kill(await pid_of_controller(controllers), signal.SIGKILL)
    async with asyncio.timeout(60):
        await controllers.stopped.wait()
    assert controllers.exit_code == 1


@pytest.mark.slow
async def test_a_reader_of_its_output_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tandem up | head`."""
    monkeypatch.setenv("TANDEM_REDIS__MODE", "none")
    with start_up(tmp_path) as process:
        await asyncio.to_thread(wait_for, process, "ready in")
        assert process.stdout is not None
        process.stdout.close()
        (state,) = (tmp_path / "state" / "tandem").glob("*.json")
        url = f"http://{json.loads(state.read_text())['http']}/v1/completions"

        def controller() -> psutil.Process | None:
            family = psutil.Process(process.pid).children()
            return next((each for each in family if "cluster.control" in each.cmdline()), None)

        first = controller()
        assert first is not None
        first.kill()  # `tandem up` says so
        async with asyncio.timeout(60), httpx.AsyncClient(timeout=60.0) as client:
            while (now := controller()) is None or now.pid == first.pid:
                await asyncio.sleep(0.05)
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
            assert (await client.post(url, json=body)).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 90) == 0


@pytest.mark.parametrize("backend", ["subprocess", "ray"])
@pytest.mark.slow
def test_no_secret_is_in_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Every user of a machine reads command lines: neither what the cluster was given nor what it draws is there."""
    password, hub_token = "redis-password-of-this-test", "hf_token-of-this-test"
    redis = TcpServer(tmp_path / "redis", BINARIES[0], f"user tandem on >{password} ~* &* +@all")
    keys = tmp_path / "keys.yaml"
    created = CliRunner().invoke(app, ["keys", "create", "--file", str(keys), "--tenant", "a"])
    key = re.findall(r"tdm_[\w-]+", created.output)[0]
    monkeypatch.setenv("TANDEM_REDIS__MODE", "external")
    monkeypatch.setenv("TANDEM_REDIS__URL", f"redis://tandem:{password}@127.0.0.1:{redis.port}/0")
    monkeypatch.setenv("TANDEM_SECURITY__AUTH__KEYS_FILE", str(keys))
    monkeypatch.setenv("HF_TOKEN", hub_token)
    try:
        with start_up(tmp_path, backend) as process:
            wait_for(process, "ready in")
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            programs = [" ".join(each.cmdline()) for each in family]
            for program in ("cluster.control", "-m router", "worker.service", "kvtransfer.agent"):
                assert any(program in each for each in programs), programs
            secrets = (password, hub_token, key.split("_", 2)[2])
            assert [each for each in programs if any(secret in each for secret in secrets)] == []
            drawn = re.compile(r"\b([0-9a-f]{32}|[0-9a-f]{64})\b")  # for routers, hashes and Ray; Ray's ids have 56
            assert [each for each in programs if drawn.search(each)] == []
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0
    finally:
        redis.kill()


@pytest.mark.parametrize("backend", ["subprocess", "ray"])
@pytest.mark.slow
def test_a_killed_tandem_up_leaves_no_process(tmp_path: Path, backend: str) -> None:
    with start_up(tmp_path, backend) as process:
        wait_for(process, "ready in")
        family = psutil.Process(process.pid).children(recursive=True)
        programs = " ".join(word for each in family for word in each.cmdline())
        for program in ("cluster.control", "worker.service", "router", "valkey-server"):
            assert program in programs
        assert ("gcs_server" in programs) == (backend == "ray")
        process.kill()
        process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert command_lines(alive) == []
