"""What a request costs the router: a real router process between real sockets, stub workers and cheap clients."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.handoff_figures import Figure
from benchmarks.router_clients import Client, GrpcClient, Heard, HttpClient, closed_loop, open_loop
from benchmarks.serving import percentile
from tandem.config import DEMO_MODEL, Disaggregation, RouterSpec
from tandem.errors import ConfigError
from tandem.launch import RouterLaunch, ServedModel
from tandem.model_store import resolve
from tandem.testing import write_tiny_llama
from tandem.tokenizer import Tokenizer

MODEL = "bench"

BLOCK_TOKENS = 16
START_TIMEOUT_S = 30.0
CORES = os.sched_getaffinity(0)
ROUTER_CORE = {max(CORES)}
OTHER_CORES = CORES - ROUTER_CORE or CORES
WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education""".split()


@dataclass(frozen=True, slots=True)
class Sizes:
    prompt_tokens: int = 256
    answer_tokens: int = 64
    prefill_workers: int = 2
    decode_workers: int = 4
    step_ms: float = 20.0
    prefill_ms: float = 5.0
    http_rate: float = 150.0  # requests/s while CPU is measured
    grpc_rate: float = 60.0
    streams: int = 400  # while the most requests/s are measured
    seconds: float = 8.0
    rounds: int = 3
    demo_model: bool = True


QUICK = Sizes(
    prompt_tokens=32, answer_tokens=4, step_ms=2, http_rate=20, grpc_rate=20, streams=4, seconds=0.3, rounds=1,
    demo_model=False,
)  # fmt: skip


class Bench:
    """A running router with its workers."""

    def __init__(self, router: psutil.Process, stubs: subprocess.Popen[str], ports: tuple[int, int], prompts: Prompts):
        self.http_port, self.grpc_port = ports
        self.prompts = prompts
        self._router = router
        self._stubs = stubs

    def cpu_s(self) -> float:
        times = self._router.cpu_times()
        return times.user + times.system

    def sent(self) -> dict[str, Any]:
        """What the workers have sent since the last call (benchmarks.router_stubs)."""
        return self._ask_stubs()

    def _ask_stubs(self) -> dict[str, Any]:
        if self._stubs.stdin is None or self._stubs.stdout is None:
            raise RuntimeError("the stub workers have no pipes")
        self._stubs.stdin.write("\n")
        self._stubs.stdin.flush()
        answer: dict[str, Any] = json.loads(self._stubs.stdout.readline())
        return answer


class Prompts:
    """Chat texts that make prompts of one length, no two alike."""

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


@asynccontextmanager
async def bench(sizes: Sizes) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _model_dir(Path(folder), demo=sizes.demo_model)
        tokenizer = Tokenizer.load(model_dir)
        text = " " + " ".join(WORDS)
        answer = tokenizer.encode(text, add_special_tokens=False)[: max(64, sizes.answer_tokens)]
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
        stubs = _start_stubs(Path(folder), sizes)
        try:
            address = json.loads(stubs.stdout.readline())["controller"] if stubs.stdout else ""
            ports = (_free_port(), _free_port())
            router = _start_router(Path(folder), model_dir, address, ports)
            try:
                await _ready(ports[0], router)
                prompts = Prompts(tokenizer, sizes.prompt_tokens)
                yield Bench(psutil.Process(router.pid), stubs, ports, prompts)
            finally:
                router.terminate()
                router.wait(10)
        finally:
            stubs.kill()
            stubs.wait()


def _model_dir(folder: Path, *, demo: bool) -> Path:
    """The demo model where it is at hand, else a tiny one: only its tokenizer and template are used."""
    if demo:
        with suppress(ConfigError):
            return resolve(DEMO_MODEL)
    return write_tiny_llama(folder / "model", vocab=4096, max_positions=4096)


@contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """What is started meanwhile runs on these cores, with all its threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _start_stubs(folder: Path, sizes: Sizes) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.router_stubs", "--model", MODEL, "--answer", f"{folder}/answer.json"]
    command += ["--prefill", str(sizes.prefill_workers), "--decode", str(sizes.decode_workers)]
    command += ["--step-ms", str(sizes.step_ms), "--prefill-ms", str(sizes.prefill_ms)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _start_router(
    folder: Path, model_dir: Path, controller: str, ports: tuple[int, int]
) -> subprocess.Popen[bytes]:
    """On one core of its own."""
    spec = RouterSpec(
        http_port=ports[0],
        grpc_port=ports[1],
        disaggregation=Disaggregation.ALWAYS,  # the same way for every request
        max_queued_requests=4096,
        max_prefill_tokens_in_flight=1 << 17,  # the router is measured, not the pace of the stubs
    )
    served = ServedModel(
        name=MODEL, model_dir=str(model_dir), model_fingerprint="bench", block_tokens=BLOCK_TOKENS
    )
    launch = RouterLaunch(
        cluster="bench",
        router_id="router-0",
        router=spec,
        models=(served,),
        controller_address=controller,
        redis_url=None,
        log_level="warning",
    )
    path = folder / "router.json"
    path.write_text(launch.model_dump_json())
    with _on(ROUTER_CORE):
        return subprocess.Popen([sys.executable, "-m", "router", "--launch", str(path)])


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def _ready(port: int, router: subprocess.Popen[bytes]) -> None:
    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    async with asyncio.timeout(START_TIMEOUT_S):
        while not await asyncio.to_thread(ask):
            if router.poll() is not None:
                raise RuntimeError(f"the router ended with {router.returncode}")
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # both pools' links


@dataclass(frozen=True, slots=True)
class Round:
    cpu_ms: float  # of the router, per request
    rps: float
    first_ms: list[float]  # time to first token beyond the worker's own, of each request
    token_ms: list[float]  # from a token's leaving its worker to the client, of each later token


async def _round(bench: Bench, client: Client, load: Any) -> Round:
    bench.sent()
    cpu_s, began_s = bench.cpu_s(), time.monotonic()
    heard: Sequence[Heard] = await load
    took_s = time.monotonic() - began_s
    cpu_s = bench.cpu_s() - cpu_s
    sent = bench.sent()
    first_ms, token_ms = [], []
    for each in heard:
        told = sent[each.request_id]
        worker_s = told["tokens_s"][0] - told["taken_s"]
        first_ms.append(1000 * (each.tokens_s[0] - each.sent_s - worker_s))
        token_ms += [1000 * (came - left) for came, left in zip(each.tokens_s, told["tokens_s"], strict=True)][1:]
    return Round(1000 * cpu_s / len(heard), len(heard) / took_s, first_ms, token_ms)


async def _figures(sizes: Sizes) -> list[Figure]:
    with _on(OTHER_CORES):  # the stubs and the clients
        return await _beside(sizes)


async def _beside(sizes: Sizes) -> list[Figure]:
    async with bench(sizes) as running:
        http = HttpClient(running.http_port, MODEL, sizes.answer_tokens)
        grpc = GrpcClient(running.grpc_port, MODEL, sizes.answer_tokens)
        try:
            return await _measure(sizes, running, http, grpc)
        finally:
            await http.close()
            await grpc.close()


async def _measure(sizes: Sizes, running: Bench, http: Client, grpc: Client) -> list[Figure]:
    prompts = running.prompts
    for client in (http, grpc):  # warms up, not counted
        await closed_loop(client, prompts, 8, min(2.0, sizes.seconds))
    of_http, of_grpc, most, half = [], [], [], []
    for _ in range(sizes.rounds):
        of_http.append(await _round(running, http, open_loop(http, prompts, sizes.http_rate, sizes.seconds)))
        of_grpc.append(await _round(running, grpc, open_loop(grpc, prompts, sizes.grpc_rate, sizes.seconds)))
        most.append(await _round(running, http, closed_loop(http, prompts, sizes.streams, sizes.seconds)))
        half.append(await _round(running, http, open_loop(http, prompts, most[-1].rps / 2, sizes.seconds)))
    for name, rounds in (("http", of_http), ("grpc", of_grpc), ("most", most), ("half", half)):
        for each in rounds:
            print(name, f"cpu {each.cpu_ms:.2f} ms, {each.rps:.0f}/s, first p50 {percentile(each.first_ms, .5):.1f} "
                  f"p99 {percentile(each.first_ms, .99):.1f}, token p50 {percentile(each.token_ms, .5):.2f} "
                  f"p99 {percentile(each.token_ms, .99):.2f}", file=sys.stderr)  # fmt: skip
    return [
        Figure("router.cpu_ms_http", round(statistics.median(each.cpu_ms for each in of_http), 2), "ms"),
        Figure("router.cpu_ms_grpc", round(statistics.median(each.cpu_ms for each in of_grpc), 2), "ms"),
        Figure("router.rps_one_core", round(statistics.median(each.rps for each in most)), "requests/s"),
        Figure("router.p99_added_ms", round(statistics.median(percentile(h.first_ms, 0.99) for h in half), 2), "ms"),
        Figure(
            "router.p99_token_ms", round(statistics.median(percentile(h.token_ms, 0.99) for h in half), 2), "ms"
        ),
    ]


def figures(sizes: Sizes) -> Iterator[Figure]:
    yield from uvloop.run(_figures(sizes))
