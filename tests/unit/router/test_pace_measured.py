"""What requests teach the router about its workers, through the real protocol."""

from collections.abc import AsyncIterator

import pytest

from router.policies.pace import START_PACE
from router.testing.stub_worker import StubWorker, until
from tandem.config.spec import Disaggregation, PolicyName, Role, RouterSpec
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
TOKEN_DELAY_S = 0.02


async def test_a_handoff_shows_the_pace_of_both_workers(cluster: Cluster) -> None:
    tokens = cluster.says("abcdefghijklmnopqrst")
    cluster.prefill.behaviour.token_delay_s = 20 * TOKEN_DELAY_S
    cluster.decode.behaviour.token_delay_s = TOKEN_DELAY_S
    prefill, decode = (cluster.worker(name).estimates for name in ("p0", "d0"))
    await cluster.openai.completions.create(model=MODEL, prompt=[70] * 256)
    await cluster.settled()
    await until(lambda: prefill.pace() != START_PACE and decode.pace().tpot_s != START_PACE.tpot_s)
    assert prefill.pace().prefill_s_per_token == pytest.approx(20 * TOKEN_DELAY_S / 256, rel=0.3)
    assert decode.pace().tpot_at_s(1) == pytest.approx(TOKEN_DELAY_S, rel=0.3)
    assert decode.pace().transfer_s_per_token != START_PACE.transfer_s_per_token
    assert decode.pace().reserve_s != START_PACE.reserve_s
    assert set(prefill.transfer_to) == {("d0", 1)}
    assert cluster.app.dispatcher.fleet.estimates.answer_tokens(MODEL) == len(tokens)


async def test_what_a_worker_had_cached_is_no_work_of_it(cluster: Cluster) -> None:
    cluster.prefill.behaviour.cached_tokens = 160
    cluster.prefill.behaviour.token_delay_s = 0.1
    await cluster.openai.completions.create(model=MODEL, prompt=[70] * 256, max_tokens=1)
    await cluster.settled()
    estimates = cluster.worker("p0").estimates
    await until(lambda: estimates.pace() != START_PACE)
    assert estimates.pace().prefill_s_per_token == pytest.approx(0.1 / 96, rel=0.3)


class TestSecondWorker:
    @pytest.fixture
    async def second(self, bare: Cluster) -> AsyncIterator[StubWorker]:
        worker = StubWorker("d1", Role.DECODE, MODEL)
        await worker.start()
        await bare.list_workers(bare.prefill, bare.decode, worker)
        yield worker
        await worker.kill()

    async def test_requests_of_a_user_meet_again(self, bare: Cluster, second: StubWorker) -> None:
        for number in range(16):
            used = []
            for _ in range(3):
                await bare.openai.completions.create(model=MODEL, prompt="Hi", user=f"user-{number}")
                await bare.settled()
                used.append(tuple(len(worker.frames("join")) for worker in (bare.decode, second)))
            first, last = used[0], used[-1]
            assert sorted((last[0] - first[0], last[1] - first[1])) == [0, 2]
        assert min(len(worker.frames("join")) for worker in (bare.decode, second)) > 0


class TestRoundRobin(TestSecondWorker):
    @pytest.fixture
    def spec(self) -> RouterSpec:
        always = Disaggregation.ALWAYS
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, policy=PolicyName.ROUND_ROBIN)

    async def test_requests_of_a_user_meet_again(self, bare: Cluster, second: StubWorker) -> None:
        """Not with this policy: each worker has its turn."""
        for _ in range(4):
            await bare.openai.completions.create(model=MODEL, prompt="Hi", user="one")
        assert [len(worker.frames("join")) for worker in (bare.decode, second)] == [2, 2]
