"""A cluster of real processes to break: for recordings of what Prometheus reads then.

`Stage` has its controller in this process and stands in other programs for ranks and agents; `Upped` is `tandem up`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from cluster.backends.protocol import ANYWHERE, MemberHandle, Resources, Where
from cluster.backends.subprocess_backend import LocalMember, SubprocessBackend
from cluster.control.controller import Controller
from cluster.control.record import WorkerState
from cluster.keeper.keeper import Keeper
from cluster.keeper.members import MemberStart, RunningMember
from cluster.spec.resolve import free_ports, resolve, with_free_ports
from tandem.config.spec import ClusterSpec
from tandem.testing.models import random_prompt, write_tiny_llama

MODEL = "tiny"
VOCAB = 300
RANK, AGENT = "cluster.backends.rank_process", "kvtransfer.agent"
POLL_S = 0.2
READY_S = 900.0
ANSWER_S = 300.0

Found = TypeVar("Found")
Programs = Mapping[str, Sequence[str]]  # of worker processes: a module, and another with its first arguments


class Replaced(LocalMember):
    """Runs other programs than it is told to."""

    def __init__(self, name: str, keeper: Keeper, programs: Programs) -> None:
        super().__init__(name, keeper)
        self._programs = programs

    async def start(self, start: MemberStart) -> None:
        processes = tuple(each.model_copy(update={"argv": self._argv(each.argv)}) for each in start.processes)
        await super().start(start.model_copy(update={"processes": processes}))

    def _argv(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        at = argv.index("-m") + 1
        return (*argv[:at], *self._programs.get(argv[at], (argv[at],)), *argv[at + 1 :])


class ReplacingBackend(SubprocessBackend):
    def __init__(self, keeper: Keeper, programs: Programs) -> None:
        super().__init__(keeper)
        self._local_keeper, self._programs = keeper, programs

    async def place(self, group: str, members: Sequence[Resources], where: Where = ANYWHERE) -> list[MemberHandle]:
        return [Replaced(f"{group}.{rank}", self._local_keeper, self._programs) for rank in range(len(members))]


class Stage:
    """One model on `prefill` and `decode` workers. `settings`: parts of the spec, merged into the stage's own."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Mapping[str, Any]],
        *,
        prefill: int = 1,
        decode: int = 2,
        programs: Programs | None = None,
    ) -> None:
        self.model = write_tiny_llama(folder / "model", vocab=VOCAB, seed=1, scale=2.0)
        spec = spec_of(self.model, settings, prefill, decode)
        self.keeper = Keeper(folder / "logs")
        resolved = with_free_ports(resolve(ClusterSpec.model_validate(spec), lambda what: None))
        backend = ReplacingBackend(self.keeper, programs or {})
        self.controller = Controller(resolved, backend, self.keeper, folder / "run", folder / "logs")
        self.scheme = "https" if resolved.spec.router.tls else "http"

    async def start(self) -> None:
        await self.controller.start()
        async with asyncio.timeout(READY_S):
            await self.controller.wait_ready(lambda what: None)

    @property
    def urls(self) -> list[str]:
        """Of the routers."""
        return [f"{self.scheme}://{slot.http_address}" for slot in self.controller.routers.slots]

    async def member(self, name: str) -> RunningMember:
        """The running member: `decode-0.0`, `router-0`, `redis`. Waits until it is started."""

        async def started() -> RunningMember | None:
            found = (await self.keeper.members()).get(name)
            return found if found is not None and found.processes else None

        return await until(started)

    async def run_dir(self, member: str) -> Path:
        return Path((await self.member(member)).start.run_dir)

    async def pid(self, member: str, process: str) -> int:
        """`process`: how its name begins."""

        async def found() -> int | None:
            processes = (await self.member(member)).processes
            return next((each.pid for each in processes if each.name.startswith(process)), None)

        return await until(found)

    async def send(self, member: str, process: str, signum: signal.Signals) -> int:
        pid = await self.pid(member, process)
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signum)
        return pid

    async def until_ready(self, worker: str, *, after: int = 0) -> None:
        """And has restarted at least `after` times."""
        slot = self.controller.workers.slots[worker]

        async def ready() -> bool:
            return slot.state is WorkerState.READY and slot.restarts >= after

        await until(ready)

    async def close(self) -> None:
        await self.controller.close()
        await self.keeper.close()


class Upped:
    """`tandem up`, as the container of a head pod runs it."""

    def __init__(self, folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder = folder
        http, grpc, admin = free_ports(*3 * ["127.0.0.1"])
        spec = spec_of(write_tiny_llama(folder / "model", vocab=VOCAB, seed=1, scale=2.0), settings, 1, 1)
        spec["router"] |= {"http_port": http, "grpc_port": grpc}
        spec["control"] |= {"admin_port": admin}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(spec))
        self.url = f"http://127.0.0.1:{http}"
        self.urls = [self.url]
        self.restarts = -1
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        self.restarts += 1
        env = os.environ | {"XDG_STATE_HOME": str(self._folder / "state"), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "cluster", "up", "--config", str(self._folder / "cluster.yaml")]
        with (self._folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def until_ready(self) -> None:
        async with asyncio.timeout(READY_S), httpx.AsyncClient() as client:

            async def ready() -> bool:
                with suppress(httpx.HTTPError):
                    return (await client.get(f"{self.url}/ready")).status_code == 200
                return False

            await until(ready)

    def kill(self) -> None:
        """The keeper, and with it everything that it started."""
        self.process.kill()
        self.process.wait()

    async def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(self.process.wait)


def spec_of(model: Path, settings: Mapping[str, Mapping[str, Any]], prefill: int, decode: int) -> dict[str, Any]:
    engine = {"kv_blocks": 256, "hang_timeout_s": 3600} | dict(settings.get("engine", {}))
    pools = {"prefill": {"workers": prefill}, "decode": {"workers": decode}}
    spec: dict[str, Any] = {
        "models": [{"source": str(model), "name": MODEL, "engine": engine, **pools}],
        "router": {"http_port": 0, "grpc_port": 0, "disaggregation": "always"},
        "control": {"admin_port": 0, "backend": "subprocess"},
    }
    for part, values in settings.items():
        if part != "engine":
            spec[part] = spec.get(part, {}) | dict(values)
    return spec


class Load:
    """Asks the routers in turn every `every_s`, whether or not the last answers have come."""

    def __init__(
        self,
        urls: Sequence[str],
        every_s: float,
        *,
        prompt: int = 48,
        answer: int = 16,
        begins: Sequence[int] = (),
        verify: Any = True,
    ) -> None:
        self._urls, self._every_s, self._prompt, self._answer = urls, every_s, prompt, answer
        self._begins, self._verify = begins, verify
        self._asked: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_S, verify=self._verify, limits=httpx.Limits()) as client:
            try:
                for number in itertools.count():
                    task = asyncio.create_task(self._ask(client, number))
                    self._asked.add(task)
                    task.add_done_callback(self._asked.discard)
                    await asyncio.sleep(self._every_s)
            finally:
                for task in list(self._asked):
                    task.cancel()
                await asyncio.gather(*self._asked, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        prompt = [*self._begins, *random_prompt(self._prompt, VOCAB, number)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": self._answer, "temperature": 0, "ignore_eos": True}
        with suppress(httpx.HTTPError):  # an outage is what these clients are for
            await client.post(f"{self._urls[number % len(self._urls)]}/v1/completions", json=body)


async def until(look: Callable[[], Awaitable[Found | None]], every_s: float = POLL_S) -> Found:
    """What `look` finds at last."""
    while True:
        if found := await look():
            return found
        await asyncio.sleep(every_s)


async def throttle(pid: Callable[[], Any], runs_s: float, rests_s: float) -> None:
    """Lets a process run for a part of the time only, as on a machine without a core for it."""
    while True:
        found = await pid()
        with suppress(ProcessLookupError):
            os.kill(found, signal.SIGSTOP)
            try:
                await asyncio.sleep(rests_s)
            finally:
                os.kill(found, signal.SIGCONT)
        await asyncio.sleep(runs_s)
