"""A router before workers that get stuck or fail: answers stay whole, and probes learn the truth from canaries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.requests.raw_request import RawRequest, RawSampling
from router.testing.stub_worker import StubWorker, script, until
from router.workers.health import HealthState
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
STALL_S = 0.8
TEXT = "a long answer"


@pytest.fixture
def spec() -> RouterSpec:
    always = Disaggregation.ALWAYS
    return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, queue_timeout_s=8.0, worker_stall_s=STALL_S)


@pytest.fixture
async def four(cluster: Cluster) -> AsyncIterator[dict[str, StubWorker]]:
    """Two workers of each role; the router prefers p0 and d0, by name."""
    others = [StubWorker("p1", Role.PREFILL, MODEL), StubWorker("d1", Role.DECODE, MODEL)]
    for worker in others:
        await worker.start()
    workers = {worker.worker_id: worker for worker in (cluster.prefill, cluster.decode, *others)}
    await cluster.list_workers(*workers.values())
    yield workers
    for worker in workers.values():
        worker.behaviour.is_stuck = False
    for worker in others:
        await worker.kill()


def says(cluster: Cluster, workers: dict[str, StubWorker]) -> list[int]:
    tokens: list[int] = cluster.says(TEXT)
    for worker in workers.values():
        worker.behaviour.answer = script(tokens)
    return tokens


async def run(cluster: Cluster) -> list[int]:
    submitted = await cluster.app.service.submit(RawRequest(MODEL, "Hi", RawSampling()))
    return [token.token_id async for pieces in submitted.stream for piece in pieces for token in piece.tokens]


def health(cluster: Cluster, worker: StubWorker) -> HealthState:
    fleet = cluster.app.dispatcher.fleet
    key = next(each.key for each in fleet.workers() if each.key.worker_id == worker.worker_id)
    state: HealthState = fleet.health.state(key)
    return state


@pytest.mark.parametrize("stuck", ["p0", "d0"])
async def test_the_requests_of_a_stuck_worker_go_on_elsewhere(
    cluster: Cluster, four: dict[str, StubWorker], stuck: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, worker = says(cluster, four), four[stuck]
    if stuck == "d0":
        worker.behaviour.token_delay_s = 0.05
    tasks = [asyncio.create_task(run(cluster)) for _ in range(4)]
    await until(lambda: bool(worker.frames("prefill" if stuck == "p0" else "join")))
    worker.behaviour.is_stuck = True
    tasks += [asyncio.create_task(run(cluster)) for _ in range(2)]
    assert await asyncio.gather(*tasks) == [tokens] * 6
    assert health(cluster, worker) in (HealthState.EJECTED, HealthState.PROBATION)  # on a slow machine, the second
    assert cluster.metric(f'tandem_ejections_total{{reason="stalled",role="{worker.role.value}"}}') == 1
    role = worker.role.value
    told = next(vars(each) for each in caplog.records if each.message == "worker ejected")
    assert (told["worker"], told["role"], told["reason"]) == (worker.worker_id, role, "stalled")
    assert cluster.metric(f'tandem_worker_health{{role="{role}",state="healthy"}}') == 1
    await until(lambda: bool(worker.cancelled))  # it was told, for when it wakes up
    worker.behaviour.is_stuck = False
    await cluster.settled()


@pytest.mark.slow
async def test_a_worker_that_works_slowly_but_steadily_stays(cluster: Cluster, four: dict[str, StubWorker]) -> None:
    tokens = says(cluster, four)
    for worker in (four["d0"], four["d1"]):
        worker.behaviour.token_delay_s = 1.5 * STALL_S / 4  # each token takes long, and every report shows a step
    four["p0"].behaviour.token_delay_s = four["p1"].behaviour.token_delay_s = 2 * STALL_S
    assert await run(cluster) == tokens
    assert cluster.metric("tandem_ejections_total") == cluster.metric("tandem_retries_total") == 0


async def test_a_lone_worker_keeps_its_requests_and_gets_new_ones_after_a_canary(cluster: Cluster) -> None:
    tokens, worker = cluster.says(TEXT), cluster.decode
    worker.behaviour.token_delay_s = 0.05
    task = asyncio.create_task(run(cluster))
    await until(lambda: bool(worker.frames("join")))
    worker.behaviour.is_stuck = True
    await until(lambda: health(cluster, worker) is not HealthState.HEALTHY)
    await until(lambda: not cluster.app.service.ready)
    assert (await cluster.http.get("/ready")).status_code == 503
    worker.behaviour.is_stuck = False
    assert await task == tokens
    assert cluster.metric("tandem_retries_total") == 0
    assert await run(cluster) == tokens
    assert cluster.metric('tandem_canaries_total{purpose="worker",result="passed"}') >= 1
    assert "_created" not in cluster.app.metrics.render().decode()
    await until(lambda: cluster.app.service.ready)
    await cluster.settled()


async def test_a_suspect_whose_canary_fails_is_out(cluster: Cluster, four: dict[str, StubWorker]) -> None:
    tokens, worker = says(cluster, four), four["d0"]
    worker.behaviour.fail_handoffs, worker.behaviour.fail_canaries = 3, True
    worker.canaries.clear()
    for _ in range(3):
        assert await run(cluster) == tokens
    await until(lambda: health(cluster, worker) is HealthState.EJECTED)
    assert worker.canaries
    assert cluster.metric('tandem_canaries_total{purpose="worker",result="failed"}') == 1


async def test_well_and_idle_workers_hear_no_canaries_and_no_timer_runs(
    cluster: Cluster, four: dict[str, StubWorker]
) -> None:
    says(cluster, four)
    await run(cluster)
    for worker in four.values():
        worker.canaries.clear()
    await asyncio.sleep(1.0)
    assert [worker.canaries for worker in four.values()] == [[], [], [], []]
    await until(lambda: cluster.app._watch._timer is None)


class TestReadiness:
    async def test_a_canary_goes_the_whole_way_once(self, bare: Cluster) -> None:
        await bare.controller.set_workers(bare.prefill)
        await until(lambda: bare.app.dispatcher.fleet.count_ready(Role.PREFILL) == 1)
        assert (await bare.http.get("/ready")).status_code == 503
        await bare.list_workers(bare.prefill, bare.decode)
        for _ in range(5):
            assert (await bare.http.get("/ready")).status_code == 200
        assert (bare.prefill.canaries, bare.decode.canaries) == (["prefill"], ["reserve", "join"])
        assert bare.metric('tandem_canaries_total{purpose="readiness",result="passed"}') == 1
        assert bare.ends("finished") == 0, "canaries are no requests"

    async def test_without_a_prefill_worker_it_is_local(self, bare: Cluster) -> None:
        await bare.list_workers(bare.decode)
        assert bare.decode.canaries == ["generate"]

    @pytest.mark.acceptance(26, here="stand-ins, 0.8 s instead of 5")
    async def test_a_cluster_that_cannot_generate_is_not_ready_until_it_can(self, bare: Cluster) -> None:
        bare.decode.behaviour.fail_canaries = True
        async with asyncio.timeout(60.0):
            await bare.controller.set_workers(bare.decode)
            await until(lambda: bare.metric('tandem_canaries_total{purpose="readiness",result="failed"}') >= 1)
        assert bare.app.dispatcher.fleet.count_ready(Role.DECODE) == 1
        assert (await bare.http.get("/ready")).status_code == 503
        bare.decode.behaviour.fail_canaries = False
        await until(lambda: bare.app.service.ready)

    async def test_handoffs_that_fail_leave_it_ready_by_local_prefill(self, bare: Cluster) -> None:
        bare.prefill.behaviour.fail_canaries = True
        await bare.controller.set_workers(bare.prefill, bare.decode)
        await until(lambda: bare.app.service.ready)
        assert bare.decode.canaries[-1] == "generate"

    async def test_the_next_fleet_after_none_is_asked_again(self, cluster: Cluster) -> None:
        cluster.decode.canaries.clear()
        await cluster.list_workers(cluster.prefill)
        assert (await cluster.http.get("/ready")).status_code == 503
        await cluster.list_workers(cluster.prefill, cluster.decode)
        assert cluster.decode.canaries
