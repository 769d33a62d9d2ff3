"""Live workers for the integration tests (see `cluster.testing.live`), and a real router before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cluster.testing.live import LivePair, LiveWorkers, live_pair, workers
from router.app import RouterApp
from router.testing.stub_worker import until
from tandem.checkpoint.model_config import fingerprint
from tandem.config.auth import AuthSpec
from tandem.config.engine import EngineSpec
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import ModelSpec, Role
from tandem.config.observability import ObservabilitySpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.config.transfer import TransferSpec
from tandem.testing.fork import ForkServer
from worker.testing.session import assert_conserved, open_session

RANK_MODULE = "cluster.backends.rank_process"
StartPair = Callable[..., AbstractAsyncContextManager[LivePair]]


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """The processes of workers begin with their imports done."""
    server = ForkServer(RANK_MODULE, "worker.service", "kvtransfer.agent.agent")
    yield server
    server.close()


@pytest.fixture
def pair(short_folder: Path, forks: ForkServer) -> StartPair:
    """`pair(model_dir, ...)`: one prefill and one decode worker, and a session with each."""
    return partial(live_pair, short_folder, rank_module=RANK_MODULE, forks=forks)


@dataclass
class Routed:
    """A real router in this process, before live workers."""

    app: RouterApp
    workers: LiveWorkers


StartRouted = Callable[..., AbstractAsyncContextManager[Routed]]


@pytest.fixture
def routed(short_folder: Path, forks: ForkServer) -> StartRouted:
    """Starts so many workers of each role and a router that always hands off. Checks conservation on leaving."""

    @asynccontextmanager
    async def start(
        model_dir: Path,
        *,
        prefill: int,
        decode: int,
        decode_tp: int = 1,
        engine: EngineSpec | None = None,
        observability: ObservabilitySpec | None = None,
        auth: AuthSpec | None = None,
        router: RouterSpec | None = None,
        rank_module: str = RANK_MODULE,
    ) -> AsyncIterator[Routed]:
        sizes = {"prefill": {"workers": prefill}, "decode": {"workers": decode, "tp": decode_tp}}
        model = ModelSpec.model_validate(
            {"source": str(model_dir), "engine": engine or EngineSpec(kv_blocks=256)} | sizes
        )
        roles = {f"prefill-{n}": Role.PREFILL for n in range(prefill)}
        roles |= {f"decode-{n}": Role.DECODE for n in range(decode)}
        forked = forks if rank_module == RANK_MODULE and model.engine.kind == "tandem" else None
        async with workers(short_folder, rank_module, forks=forked) as running:
            await asyncio.gather(
                *(running.start(worker_id, role, model, TransferSpec()) for worker_id, role in roles.items())
            )
            app = RouterApp(router_launch(model, model_dir, running.controller_address, observability, auth, router))
            await app.start()
            try:
                await until(lambda: app.dispatcher.fleet.count_ready(Role.DECODE) == decode)
                await until(lambda: app.dispatcher.fleet.count_ready(Role.PREFILL) == prefill)
                yield Routed(app, running)
                async with AsyncExitStack() as sessions:
                    infos = running.directory.workers.values()  # of each worker's last life
                    alive = [info for info in infos if running.live[info.worker_id].can_answer]
                    await assert_conserved(
                        *[await sessions.enter_async_context(open_session(info.address)) for info in alive]
                    )
            finally:
                await app.close()

    return start


def router_launch(
    model: ModelSpec,
    model_dir: Path,
    controller_address: str,
    observability: ObservabilitySpec | None = None,
    auth: AuthSpec | None = None,
    router: RouterSpec | None = None,
) -> RouterLaunch:
    served = ServedModel(
        name="tiny",
        model_dir=str(model_dir),
        model_fingerprint=fingerprint(model_dir),
        block_tokens=model.engine.block_tokens,
    )
    return RouterLaunch(
        cluster="test",
        router_id="router-0",
        router=router or RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS),
        models=(served,),
        controller_address=controller_address,
        redis_url=None,
        observability=observability or ObservabilitySpec(),
        auth=auth or AuthSpec(),
    )


@pytest.fixture
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private folder whose path leaves room for a unix socket's name (108 bytes in all)."""
    return tmp_path_factory.mktemp("w")
