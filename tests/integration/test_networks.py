"""Router, workers and Redis on machines of their own, with a network that is slow, loses packets or is cut."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cluster.testing.live import LiveWorkers, workers
from router.app import RouterApp
from router.testing.index import BINARIES
from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.launch import AUTO_HOST
from tandem.config.model import ModelSpec, Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.config.transfer import TransferSpec, TransportKind
from tandem.errors import TandemError
from tandem.testing.machines import HOME, Machines, Way, call_far
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.integration.conftest import RANK_MODULE, router_launch
from tests.integration.test_migration import GREEDY, SEEDED, VOCAB, Asked
from worker.testing.session import assert_conserved, open_session

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
CUT_S = 30.0 if os.environ.get("TANDEM_SOAK") else 8.0
ENDS_S = 60.0
HEALED_S = 10.0 if os.environ.get("TANDEM_SOAK") else 30.0  # here, other tests may have both cores
ASKS = [(random_prompt(60 + 40 * n, VOCAB, n), SEEDED if n % 2 else GREEDY) for n in range(6)]


@dataclass
class Far:
    """A router in this process, far from everything else."""

    machines: Machines
    workers: LiveWorkers
    app: RouterApp
    expected: list[list[int]]

    async def ends(self) -> list[str]:
        """Asks everything at once: "right", or the code of the error. A wrong token is neither."""
        asked = [Asked(self.app.service, *ask) for ask in ASKS]
        async with asyncio.timeout(ENDS_S):
            results = await asyncio.gather(*(each.task for each in asked), return_exceptions=True)
        ends = []
        for each, expected, result in zip(asked, self.expected, results, strict=True):
            if isinstance(result, TandemError):
                ends.append(result.code.value)
                assert each.tokens == expected[: len(each.tokens)]
            elif isinstance(result, BaseException):
                raise result
            else:
                assert each.tokens == expected
                ends.append("right")
        return ends

    async def all_right_again(self) -> None:
        """Within HEALED_S everything is answered, and handed off, as before."""
        deadline_s = time.monotonic() + HEALED_S
        while set(await self.ends()) != {"right"} or not await self._hands_off():
            assert time.monotonic() < deadline_s, f"not healed within {HEALED_S:g} s"
            await asyncio.sleep(0.5)

    async def _hands_off(self) -> bool:
        prefill = next(each for each in self.app.dispatcher.fleet.workers() if each.role is Role.PREFILL)
        decodes = [each for each in self.app.dispatcher.fleet.workers() if each.role is Role.DECODE]
        return prefill.link.ready and all(each.link.ready and prefill.reaches(each) for each in decodes)


async def run_far(scenario: Callable[[Far], Awaitable[None]], machines: Machines, folder: Path) -> None:
    model_dir = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    model = ModelSpec(source=str(model_dir), engine=EngineSpec(kv_blocks=300, max_step_tokens=100))
    redis_at = f"{machines.addresses['redis']}"
    options = ["--port", "6379", "--bind", redis_at, "--protected-mode", "no", "--save", ""]
    command = [BINARIES[0], *options, "--dir", str(folder)]
    redis = machines.run_on("redis", lambda: subprocess.Popen(command, stdout=subprocess.DEVNULL))
    try:
        async with workers(folder, RANK_MODULE, f"redis://{redis_at}:6379", machines=machines) as running:
            transfer = TransferSpec(transport=TransportKind.TCP, bind_host=AUTO_HOST)
            await asyncio.gather(*(running.start(name, role, model, transfer) for name, role in ROLES.items()))
            launch = router_launch(
                model, model_dir, running.controller_address,
                router=RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS),
            ).model_copy(update={"redis_url": running.redis_url})  # fmt: skip
            app = RouterApp(launch)
            await app.start()
            try:
                fleet = app.dispatcher.fleet
                await until(lambda: fleet.count_ready(Role.PREFILL) == 1 and fleet.count_ready(Role.DECODE) == 2)
                far = Far(machines, running, app, [])
                asked = [Asked(app.service, *ask) for ask in ASKS]
                await asyncio.gather(*(each.task for each in asked))
                far.expected = [each.tokens for each in asked]
                await far.all_right_again()
                await scenario(far)
                await far.all_right_again()
                async with AsyncExitStack() as sessions:
                    infos = running.directory.workers.values()
                    await assert_conserved(
                        *[await sessions.enter_async_context(open_session(info.address)) for info in infos]
                    )
            finally:
                await app.close()
    finally:
        redis.kill()
        redis.wait()


def in_a_process(scenario: Callable[[Far], Awaitable[None]], folder: Path, machines: Machines) -> None:
    asyncio.run(run_far(scenario, machines, folder))


@pytest.fixture
def far(short_folder: Path) -> Callable[[Callable[[Far], Awaitable[None]]], None]:
    """Runs a scenario in a process of its own, whose network it may change."""

    def run(scenario: Callable[[Far], Awaitable[None]]) -> None:
        call_far(partial(in_a_process, scenario, short_folder), "redis", *ROLES, timeout_s=300.0)

    return run


async def slow_and_lossy(far: Far) -> None:
    far.machines.set_all(Way(delay_s=0.1, loss=0.05))
    for _ in range(ROUNDS):
        assert set(await far.ends()) == {"right"}
    far.machines.heal()


ROUNDS = 20 if os.environ.get("TANDEM_SOAK") else 1


@pytest.mark.soak
@pytest.mark.acceptance(11, here="100 ms each way, 6 answers", soak="20 times 6 answers")
def test_a_slow_network_that_loses_packets_changes_no_token(far: Callable[..., None]) -> None:
    far(slow_and_lossy)


async def cut(source: str, target: str, both: bool, far: Far) -> None:
    """Requests under way when the network is cut, and those that come meanwhile."""
    early = asyncio.create_task(far.ends())
    await until(lambda: any(worker.account.requests for worker in far.app.dispatcher.fleet.workers()))
    began_s = time.monotonic()
    far.machines.cut(source, target, both=both)
    ends = [*await early]
    while time.monotonic() - began_s < CUT_S:
        ends += await far.ends()
    far.machines.heal()
    assert "internal" not in ends


@pytest.mark.soak
@pytest.mark.acceptance(10, here="four cuts of 8 s", soak="each pair and direction, 30 s")
@pytest.mark.parametrize(
    ("source", "target", "both"),
    [
        (HOME, "decode-0", True),
        pytest.param(HOME, "decode-0", False, marks=pytest.mark.soak_only),
        ("decode-0", HOME, False),
        pytest.param(HOME, "prefill-0", True, marks=pytest.mark.soak_only),
        pytest.param("prefill-0", HOME, False, marks=pytest.mark.soak_only),
        pytest.param("prefill-0", "decode-0", True, marks=pytest.mark.soak_only),
        ("prefill-0", "decode-0", False),
        pytest.param("decode-0", "prefill-0", False, marks=pytest.mark.soak_only),
        pytest.param("decode-0", "redis", True, marks=pytest.mark.soak_only),
        (HOME, "redis", True),
        pytest.param("redis", HOME, False, marks=pytest.mark.soak_only),
    ],
)
def test_a_cut_between_two_parts_ends_in_answers_or_typed_errors_and_heals(
    far: Callable[..., None], source: str, target: str, both: bool
) -> None:
    far(partial(cut, source, target, both))
