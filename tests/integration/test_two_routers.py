"""Two routers before the same live workers: each sees the other's load, and goes on when it is cut off from Redis or
from some of the workers. Soon after the network has healed both see the same again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from cluster.testing.live import FakeController, LiveWorkers, workers
from router.app import RouterApp
from router.policies.types import Candidate
from router.requests.raw_request import RawRequest, RawSampling
from router.testing.index import RedisServer
from router.testing.stub_worker import until
from router.workers.fleet import Worker
from tandem.checkpoint.model_config import fingerprint
from tandem.config.engine import EngineSpec
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import ModelSpec, Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.config.transfer import TransferSpec
from tandem.request import SamplingParams
from tandem.testing.fork import ForkServer
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.testing.net import TcpProxy, tcp_proxy
from tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tests.conftest import Reference
from tests.integration.conftest import RANK_MODULE
from worker.testing.session import WorkerSession, assert_conserved, open_session

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one set of workers serves all
VOCAB = 300
CONVERGED_S = 5.0 if os.environ.get("TANDEM_SOAK") else 30.0  # here, other tests may have both cores
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
BLOCKS = 2000
# Small steps, so that prompts take several.
ENGINE = EngineSpec(kv_blocks=BLOCKS, max_step_tokens=64)
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


class Behind(FakeController):
    """The directory as a router sees it that reaches each worker only through a proxy."""

    def __init__(self, real: FakeController, ports: dict[str, int]) -> None:
        super().__init__()
        self._ports = ports
        self.workers = {name: self._moved(info) for name, info in real.workers.items()}

    def _moved(self, info: cluster_pb2.WorkerInfo) -> cluster_pb2.WorkerInfo:
        moved = cluster_pb2.WorkerInfo()
        moved.CopyFrom(info)
        moved.address = f"127.0.0.1:{self._ports[info.worker_id]}"
        return moved


@dataclass
class World:
    """`apps[1]` has every worker and Redis behind a proxy."""

    workers: LiveWorkers
    apps: list[RouterApp]
    sessions: dict[str, WorkerSession]  # of a third router, that only listens
    proxies: dict[str, TcpProxy]  # by worker; and "redis"
    model_dir: Path

    def worker(self, app: int, worker_id: str) -> Worker:
        info = self.workers.directory.workers[worker_id]
        found = self.apps[app].dispatcher.fleet.worker(worker_id, info.epoch)
        assert found is not None
        return found

    def sees(self, app: int, worker_id: str) -> Candidate:
        return self.worker(app, worker_id).candidate(0)

    @contextmanager
    def tokens_seen(self, app: int, worker_id: str) -> Iterator[list[int]]:
        """What the worker had outstanding after each report: between two polls it may do all of it."""
        fleet, seen = self.apps[app].dispatcher.fleet, list[int]()
        on_load = fleet.on_load

        def reported() -> None:
            seen.append(self.sees(app, worker_id).outstanding_tokens)
            on_load()

        fleet.on_load = reported
        try:
            yield seen
        finally:
            fleet.on_load = on_load

    def same_load(self, *worker_ids: str) -> bool:
        """Both routers see these workers at rest, as they are."""
        return all(
            self.worker(app, worker_id).link.ready
            and self.sees(app, worker_id).outstanding_tokens == self.sees(app, worker_id).running_requests == 0
            and self.sees(app, worker_id).free_blocks == self.sees(app, worker_id).total_blocks > 0
            for worker_id in worker_ids
            for app in (0, 1)
        )

    def same_index(self) -> bool:
        """Both have followed every worker up to the same event, and hold as many blocks."""
        mirrors = [app.mirror for app in self.apps]
        keys = self.apps[0].dispatcher.fleet.keys()
        return len(mirrors[0]) == len(mirrors[1]) and all(
            mirrors[0].seq(key) == mirrors[1].seq(key) is not None for key in keys
        )

    async def ask(self, app: int, prompt: list[int], sampling: dict[str, Any], max_tokens: int = 8) -> list[int]:
        raw = RawRequest("tiny", tuple(prompt), RawSampling(**sampling, max_tokens=max_tokens))
        submitted = await self.apps[app].service.submit(raw)
        return [token.token_id async for pieces in submitted.stream for piece in pieces for token in piece.tokens]


@asynccontextmanager
async def directory_server(directory: FakeController) -> AsyncIterator[str]:
    server = grpc.aio.server()
    cluster_pb2_grpc.add_ClusterServicer_to_server(directory, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def router(number: int, model_dir: Path, controller_address: str, redis_url: str) -> AsyncIterator[RouterApp]:
    served = ServedModel(
        name="tiny", model_dir=str(model_dir), model_fingerprint=fingerprint(model_dir), block_tokens=16
    )
    spec = RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS)
    app = RouterApp(
        RouterLaunch(
            cluster="test",
            router_id=f"router-{number}",
            router=spec,
            models=(served,),
            controller_address=controller_address,
            redis_url=redis_url,
        )
    )
    await app.start()
    try:
        yield app
    finally:
        await app.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_world(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("w")
    model_dir = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    redis = RedisServer(folder)
    redis.start()
    try:
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(workers(folder, RANK_MODULE, redis.url, forks))
            model = ModelSpec(source=str(model_dir), engine=ENGINE)
            infos = await asyncio.gather(
                *(running.start(name, role, model, TransferSpec()) for name, role in ROLES.items())
            )
            proxies = {}
            for info in infos:
                host, port = info.address.rsplit(":", 1)
                connect = partial(asyncio.open_connection, host, int(port))
                proxies[info.worker_id] = await stack.enter_async_context(tcp_proxy(connect))
            socket = redis.url.removeprefix("unix://")
            proxies["redis"] = await stack.enter_async_context(tcp_proxy(partial(asyncio.open_unix_connection, socket)))
            behind = Behind(running.directory, {name: proxies[name].port for name in ROLES})
            controllers = [running.controller_address, await stack.enter_async_context(directory_server(behind))]
            urls = [redis.url, f"redis://{proxies['redis'].address}"]
            apps = [await stack.enter_async_context(router(n, model_dir, controllers[n], urls[n])) for n in range(2)]
            sessions = {info.worker_id: await stack.enter_async_context(open_session(info.address)) for info in infos}
            found = World(running, apps, sessions, proxies, model_dir)
            await until(lambda: all(app.dispatcher.fleet.count_ready(Role.DECODE) == 2 for app in apps), 20.0)
            await until(lambda: all(app.dispatcher.fleet.count_ready(Role.PREFILL) == 1 for app in apps), 20.0)
            await until(found.same_index, 20.0)
            yield found
    finally:
        redis.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def world(running_world: World) -> AsyncIterator[World]:
    yield running_world
    await assert_conserved(*running_world.sessions.values())


async def within(seconds: float, condition: Callable[[], bool], what: str) -> None:
    started_s = time.monotonic()
    await until(condition, seconds)
    print(f"{what}: {time.monotonic() - started_s:.2f} s")


async def test_each_router_sees_what_the_other_gave_the_workers_at_any_length(world: World) -> None:
    prompts = [random_prompt(length, VOCAB, length) for length in (1500, 40, 700)]
    expected = [await world.ask(0, prompt, SEEDED) for prompt in prompts]
    assert [await world.ask(1, prompt, SEEDED) for prompt in prompts] == expected
    await within(CONVERGED_S, lambda: world.same_load(*ROLES), "at rest")

    long = random_prompt(1800, VOCAB, 99)
    with world.tokens_seen(1, "prefill-0") as seen:
        asked = asyncio.create_task(world.ask(0, long, GREEDY, 200))
        await until(lambda: any(seen))
    most = max(seen)
    assert 64 < most <= 1800, "its tokens, not its being a request"
    assert world.worker(1, "prefill-0").account.prefill_tokens == 0, "none of them is this router's own"
    decodes = ("decode-0", "decode-1")
    await until(lambda: any(world.sees(1, name).running_requests == 1 for name in decodes))
    decode = max(decodes, key=lambda name: world.sees(1, name).running_requests)
    assert world.sees(1, decode).free_blocks <= BLOCKS - 1800 // 16
    # The report goes down as the prompt is computed, for both alike: also for the router whose request it is.
    await until(lambda: world.sees(1, "prefill-0").outstanding_tokens <= most // 2)
    rank = world.workers.live["prefill-0"].ranks[0]
    rank.send_signal(signal.SIGSTOP)  # reports of one step reach the two in any order
    try:
        await until(lambda: world.sees(0, "prefill-0").outstanding_tokens <= most // 2 + 64)
    finally:
        rank.send_signal(signal.SIGCONT)
    other = await world.ask(1, prompts[1], SEEDED)
    assert other == expected[1]
    await asked
    await within(CONVERGED_S, lambda: world.same_load(*ROLES), "at rest again")


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.soak_only)], ids=["cut", "silent"])
@pytest.mark.acceptance(10, here="router and Redis: closed", soak="silent too")
async def test_a_router_without_redis_goes_on_and_knows_everything_soon_after(world: World, silent: bool) -> None:
    before = [random_prompt(320, VOCAB, n + 100 * silent) for n in range(3)]
    await within(CONVERGED_S, world.same_index, "index, before")
    at_least = len(world.apps[1].mirror) + 3 * 320 // 16
    expected = [await world.ask(0, prompt, GREEDY) for prompt in before]
    await within(CONVERGED_S, lambda: len(world.apps[1].mirror) >= at_least, "blocks, undisturbed")
    await within(CONVERGED_S, world.same_index, "index, undisturbed")
    known = len(world.apps[1].mirror)
    proxy = world.proxies["redis"]
    proxy.silence() if silent else proxy.cut()
    meanwhile = [random_prompt(320, VOCAB, 10 + n + 100 * silent) for n in range(3)]
    started_s = time.monotonic()
    fresh = [await world.ask(1, prompt, SEEDED) for prompt in meanwhile]
    assert [await world.ask(1, prompt, GREEDY) for prompt in before] == expected
    assert [await world.ask(0, prompt, SEEDED) for prompt in meanwhile] == fresh
    await asyncio.sleep(max(0.0, started_s + 3.0 - time.monotonic()))
    assert len(world.apps[1].mirror) == known, "frozen, not forgotten"
    assert not world.same_index()
    proxy.heal()
    await within(CONVERGED_S, world.same_index, "index, after healing")
    assert len(world.apps[1].mirror) > known


@pytest.mark.parametrize("silent", [pytest.param(False, marks=pytest.mark.soak_only), True], ids=["cut", "silent"])
@pytest.mark.slow
@pytest.mark.acceptance(10, here="router and worker: silent, 3 to 4 s", soak="closed too")
async def test_a_router_cut_off_from_a_worker_goes_on_with_the_others_and_finds_it_again(
    world: World, silent: bool, reference_for: Callable[[Path], Reference]
) -> None:
    # New prompts each time, so that no cache chooses the worker; their answers rest on no near tie of two logits.
    seeds = (30, 31, 32, 33, 34, 41) if silent else (0, 1, 2, 3, 4, 17)
    prompts = [random_prompt(100 + 30 * n, VOCAB, seed) for n, seed in enumerate(seeds)]
    asks = [(prompt, SEEDED if n % 2 else GREEDY) for n, prompt in enumerate(prompts)]
    reference = reference_for(world.model_dir)
    expected = [reference.answer(prompt, SamplingParams(**kind, max_tokens=120)) for prompt, kind in asks]
    running = [asyncio.create_task(world.ask(1 - n % 2, *ask, 120)) for n, ask in enumerate(asks)]
    await until(lambda: world.worker(1, "decode-0").account.requests > 0, 20.0)
    await until(lambda: world.sessions["decode-0"].load.running_requests > 0, 20.0)
    proxy = world.proxies["decode-0"]
    proxy.silence() if silent else proxy.cut()
    if not silent:
        await until(lambda: not world.worker(1, "decode-0").link.ready, CONVERGED_S)
        assert world.worker(0, "decode-0").link.ready, "the other router is not disturbed"
        assert await asyncio.gather(*running) == expected
        # What the lost session had there is gone, and the other router's requests never were in danger.
        await assert_conserved(world.sessions["decode-0"])
        assert world.apps[1].dispatcher.fleet.count_ready(Role.DECODE) == 1
        assert await world.ask(1, *asks[0], 120) == expected[0]
        await asyncio.sleep(2.0)
    else:
        await asyncio.sleep(4.0)
    proxy.heal()
    await asyncio.sleep(0.1)  # a silent connection is known to be lost
    await within(CONVERGED_S, lambda: world.worker(1, "decode-0").link.ready, "link, after healing")
    assert await asyncio.gather(*running) == expected
    await within(CONVERGED_S, lambda: world.same_load(*ROLES), "load, after healing")
    with world.tokens_seen(1, "prefill-0") as seen:
        await world.ask(0, random_prompt(1800, VOCAB, 77 + silent), GREEDY)
        await until(lambda: any(seen))
    await within(CONVERGED_S, lambda: world.same_load(*ROLES) and world.same_index(), "load and index, at the end")
