"""A real router process on its own core, in front of stub workers in another process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.router_stubs import BLOCK_TOKENS, CLUSTER, FINGERPRINT
from cluster.spec.resolve import free_ports
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.observability import ObservabilitySpec
from tandem.config.router import RouterSpec
from tandem.text.tokenizer import Tokenizer

MODEL = "bench"
START_TIMEOUT_S = 60.0
CORES = os.sched_getaffinity(0)
ROUTER_CORE = {max(CORES)}
OTHER_CORES = CORES - ROUTER_CORE or CORES
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
WORDS = COMMON_WORDS.split(" ")


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """`stub_options`: of benchmarks.router_stubs. `running` chooses the router's ports."""

    model_dir: Path
    router: RouterSpec
    stub_options: Sequence[str]
    redis_url: str | None = None
    observability: ObservabilitySpec = ObservabilitySpec()  # noqa: RUF009  # frozen


class RouterBench:
    """A running router with its workers."""

    def __init__(self, router: subprocess.Popen[bytes], stubs: subprocess.Popen[str], http_port: int, grpc_port: int):
        self.http_port = http_port
        self.grpc_port = grpc_port
        self._router = psutil.Process(router.pid)
        self._stubs = stubs

    def cpu_s(self) -> float:
        """User and system time of the router so far."""
        times = self._router.cpu_times()
        return times.user + times.system

    def sent(self) -> dict[str, Any]:
        """What the workers sent since the last call, by request; see benchmarks.router_stubs."""
        if self._stubs.stdin is None or self._stubs.stdout is None:
            raise RuntimeError("the stub workers' process has no pipes")
        self._stubs.stdin.write("\n")
        self._stubs.stdin.flush()
        answer: dict[str, Any] = json.loads(self._stubs.stdout.readline())
        return answer


class ChatPrompts:
    """Chat texts of one prompt length, all different."""

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        self._dice = random.Random(1)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._made = [self._make() for _ in range(64)]

    def _make(self) -> list[str]:
        words: list[str] = []
        while len(self._tokenizer.encode(" ".join(words), add_special_tokens=False)) < self._tokens:
            words.append(self._dice.choice(WORDS))
        return words

    def __call__(self) -> str:
        words = self._dice.choice(self._made)
        at = self._dice.randrange(len(words))
        return " ".join(words[at:] + words[:at])


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Within the context this process and all processes it starts run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def running(setup: RouterSetup) -> AsyncIterator[RouterBench]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = " " + " ".join(WORDS)
        answer = Tokenizer.load(setup.model_dir).encode(text, add_special_tokens=False)
        (folder / "answer.json").write_text(json.dumps(answer))
        with on_cores(OTHER_CORES):
            stubs = _start_stubs(folder, setup.stub_options)
        try:
            controller = json.loads(stubs.stdout.readline())["controller"] if stubs.stdout else ""
            ports = free_ports("127.0.0.1", "127.0.0.1")
            with on_cores(ROUTER_CORE):
                router = _start_router(folder, setup, controller, ports)
            try:
                await answers_at(ports[0], "/ready", router)
                yield RouterBench(router, stubs, ports[0], ports[1])
            finally:
                router.terminate()
                router.wait(15)
        finally:
            stubs.kill()
            stubs.wait()


def _start_stubs(folder: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.router_stubs", "--model", MODEL, "--answer", f"{folder}/answer.json"]
    return subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _start_router(folder: Path, setup: RouterSetup, controller: str, ports: Sequence[int]) -> subprocess.Popen[bytes]:
    served = ServedModel(
        name=MODEL, model_dir=str(setup.model_dir), model_fingerprint=FINGERPRINT, block_tokens=BLOCK_TOKENS
    )
    launch = RouterLaunch(
        cluster=CLUSTER,
        router_id="router-0",
        router=setup.router.model_copy(update={"http_port": ports[0], "grpc_port": ports[1]}),
        models=(served,),
        controller_address=controller,
        redis_url=setup.redis_url,
        observability=setup.observability,
        log_level="error",
    )
    path = folder / "router.json"
    path.write_text(launch.model_dump_json())
    return subprocess.Popen([sys.executable, "-m", "router", "--launch", str(path)])


async def answers_at(port: int, path: str, router: subprocess.Popen[bytes]) -> None:
    """Waits until the router answers at `path`. Raises RuntimeError, TimeoutError."""

    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(ask):
            if router.poll() is not None:
                raise RuntimeError(f"the router exited with status {router.returncode}")
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # for the router to connect to every worker
