from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from router.app import RouterApp
from router.testing.controller import StubController
from router.testing.index import BINARIES, IndexReplica, RedisServer
from router.testing.stub_worker import StubWorker, script, until
from router.workers.fleet import Worker
from tandem.config.auth import AuthSpec
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.observability import ObservabilitySpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.testing.models import write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tandem.v1.inference_pb2_grpc import InferenceStub

MODEL = "tiny"
EOS = 2
SECRET = "only-the-controller-knows"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), max_positions=2048, eos_token_id=EOS)


class Cluster:
    """A real router between real clients and stub workers."""

    def __init__(
        self,
        model_dir: Path,
        spec: RouterSpec,
        max_model_tokens: int,
        observability: ObservabilitySpec | None = None,
        auth: AuthSpec | None = None,
    ) -> None:
        self.tokenizer = Tokenizer.load(model_dir)
        self.controller = StubController()
        self.prefill = StubWorker("p0", Role.PREFILL, MODEL)
        self.decode = StubWorker("d0", Role.DECODE, MODEL)
        self._model_dir = model_dir
        self._spec = spec
        self._auth = auth or AuthSpec()
        self._max_model_tokens = max_model_tokens
        self._observability = observability or ObservabilitySpec()
        self.app: RouterApp

    async def start(self) -> None:
        await self.controller.start()
        for worker in (self.prefill, self.decode):
            await worker.start()
        served = ServedModel(
            name=MODEL,
            model_dir=str(self._model_dir),
            model_fingerprint="f",
            block_tokens=16,
            max_model_tokens=self._max_model_tokens,
        )
        launch = RouterLaunch(
            cluster="test",
            router_id="router-0",
            router=self._spec,
            models=(served,),
            controller_address=self.controller.address,
            redis_url=None,
            controller_secret=SECRET,
            observability=self._observability,
            auth=self._auth,
            salt_secret="of-all-routers",
        )
        self.app = RouterApp(launch)
        await self.app.start()
        self.base_url = f"http://127.0.0.1:{self.app.http_port}"
        # Without TLS: to read the system's authorities takes longer than all else here, in each test.
        self.http = httpx.AsyncClient(base_url=self.base_url, timeout=60, verify=False)
        plain = DefaultAsyncHttpxClient(timeout=60, verify=False)
        # Its overloads know no bodies from a dict, and no fields of ours.
        self.openai: Any = AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, http_client=plain)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.app.grpc_port}")
        self.inference = InferenceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.http.aclose()
        await self.openai.close()
        await self.app.close()
        for worker in (self.prefill, self.decode):
            await worker.kill()
        await self.controller.stop()

    async def list_workers(self, *workers: StubWorker) -> None:
        """Puts workers into the directory and waits until the router can use exactly those."""
        await self.controller.set_workers(*workers)
        fleet = self.app.dispatcher.fleet
        counts = {role: sum(worker.role is role for worker in workers) for role in Role}
        await until(lambda: all(fleet.count_ready(role) == count for role, count in counts.items()))
        await until(lambda: self.app.service.ready == bool(counts[Role.DECODE]))

    def worker(self, worker_id: str) -> Worker:
        """As the router has it, in its first epoch."""
        worker = self.app.dispatcher.fleet.worker(worker_id, 1)
        assert worker is not None
        return worker

    def raw_stream(self, method: str) -> Any:
        """A method of one message as bytes on the wire; grpc's types know no method without serializers."""
        return self.channel.unary_stream(method)

    def says(self, text: str) -> list[int]:
        """Both workers answer every prompt with `text`, also when it begins in the prompt. Returns its tokens."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        for worker in (self.prefill, self.decode):
            worker.behaviour.answer = script(tokens)
        return tokens

    async def settled(self) -> None:
        """Until no request is anywhere; no account may be left open."""
        fleet = self.app.dispatcher.fleet
        workers = [*fleet.ready(MODEL, Role.PREFILL), *fleet.ready(MODEL, Role.DECODE)]
        await until(
            lambda: (
                self.app.dispatcher.active == 0
                and all(w.account.requests == 0 and w.account.prefill_tokens == 0 and w.link.idle for w in workers)
            )
        )

    def metric(self, line_start: str) -> float:
        """Sum of the samples whose exposition line starts so."""
        lines = self.app.metrics.render().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))

    def ends(self, state: str) -> float:
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.app.metrics.render().decode().splitlines()
            if line.startswith("tandem_requests_total{") and f'state="{state}"' in line
        )


@pytest.fixture
def spec() -> RouterSpec:
    """Overridden by tests that need another."""
    always = Disaggregation.ALWAYS
    return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, queue_timeout_s=5.0, max_body_bytes=65536)


@pytest.fixture
def max_model_tokens() -> int:
    return 512


@pytest.fixture
def observability() -> ObservabilitySpec:
    return ObservabilitySpec()


@pytest.fixture
def auth() -> AuthSpec:
    """Likewise."""
    return AuthSpec()


@pytest.fixture
async def bare(
    model_dir: Path, spec: RouterSpec, max_model_tokens: int, observability: ObservabilitySpec, auth: AuthSpec
) -> AsyncIterator[Cluster]:
    """No worker in the directory yet."""
    cluster = Cluster(model_dir, spec, max_model_tokens, observability, auth)
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def cluster(bare: Cluster) -> Cluster:
    await bare.list_workers(bare.prefill, bare.decode)
    return bare


@pytest.fixture(
    params=[BINARIES[0], *(pytest.param(other, marks=pytest.mark.slow) for other in BINARIES[1:])],
    ids=lambda binary: Path(binary).name,
)
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, request.param)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def side(server: RedisServer) -> AsyncIterator[IndexReplica]:
    side = IndexReplica(server)
    side.follower.start()
    yield side
    await side.follower.close()
