import math

import pytest

from router.policies.pace import START_PACE, START_TPOT_S, Pace, batch_shape
from router.policies.pace_estimates import HALF_LIFE_S, START_ANSWER_TOKENS, Estimates, WorkerEstimates
from tandem.config.model import Role
from tandem.rpc.identity import WorkerEpoch
from tandem.testing.models import FakeClock

D0: WorkerEpoch = ("d0", 1)


class Pools:
    """Two prefill and two decode workers of one model."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000.0)
        self.estimates = Estimates(self.clock)
        self.p0, self.p1 = (self.estimates.worker("m", Role.PREFILL) for _ in range(2))
        self.d0, self.d1 = (self.estimates.worker("m", Role.DECODE) for _ in range(2))

    def pace(self, worker: WorkerEstimates) -> Pace:
        self.clock.advance(0.3)
        return worker.pace()

    def prefill_us(self, worker: WorkerEstimates) -> float:
        return self.pace(worker).prefill_s_per_token * 1e6


@pytest.fixture
def pools() -> Pools:
    return Pools()


def test_before_the_first_observation_all_have_the_start_values(pools: Pools) -> None:
    for worker in (pools.p0, pools.d0):
        assert pools.pace(worker) == START_PACE
    assert pools.estimates.answer_tokens("m") == START_ANSWER_TOKENS
    assert pools.p0.transfer_to == {}


def test_a_worker_not_seen_yet_counts_as_its_peers_and_a_decode_worker_as_the_prefill_workers(pools: Pools) -> None:
    pools.p0.prefilled(10_000, 1.0)
    assert pools.prefill_us(pools.p1) == pytest.approx(100)
    assert pools.prefill_us(pools.d0) == pytest.approx(100)
    pools.d1.prefilled(1000, 0.5)
    assert pools.prefill_us(pools.d0) == pytest.approx(500)
    assert pools.prefill_us(pools.p1) == pytest.approx(100)


def test_another_models_workers_are_no_peers(pools: Pools) -> None:
    pools.p0.prefilled(10_000, 1.0)
    assert pools.pace(pools.estimates.worker("other", Role.PREFILL)) == START_PACE


def test_rate_follows_observations_and_tells_workers_apart(pools: Pools) -> None:
    for _ in range(50):
        pools.p0.prefilled(4000, 0.4)
        pools.p1.prefilled(4000, 1.6)
        pools.clock.advance(0.5)
    assert pools.prefill_us(pools.p0) == pytest.approx(100, rel=0.1)
    assert pools.prefill_us(pools.p1) == pytest.approx(400, rel=0.1)


def test_tokens_ahead_count_so_that_a_long_queue_is_no_slow_worker(pools: Pools) -> None:
    """Eight prompts of 1,000 tokens sent at once to a worker of 10,000 tokens/s."""
    for ahead in range(8):
        pools.p0.prefilled(1000 * (ahead + 1), 0.1 * (ahead + 1))
    assert pools.prefill_us(pools.p0) == pytest.approx(100)


def test_a_change_of_speed_is_seen_within_two_half_lives(pools: Pools) -> None:
    for seconds in [0.4] * 100 + [1.6] * int(2 * HALF_LIFE_S):
        pools.p0.prefilled(4000, seconds)
        pools.p1.prefilled(4000, 0.4)
        pools.clock.advance(1)
    assert pools.prefill_us(pools.p0) == pytest.approx(400, rel=0.3)


def test_one_slow_answer_does_not_banish_a_worker_for_good(pools: Pools) -> None:
    for _ in range(20):
        pools.p1.prefilled(4000, 0.4)
    pools.p0.prefilled(500, 30.0)
    assert pools.prefill_us(pools.p0) > 1000
    for _ in range(600):
        pools.p1.prefilled(4000, 0.4)
        pools.clock.advance(1)
    assert pools.prefill_us(pools.p0) == pytest.approx(100, rel=0.05)


def test_an_idle_night_changes_nothing(pools: Pools) -> None:
    pools.p0.prefilled(4000, 0.4)
    pools.clock.advance(86_400)
    assert pools.prefill_us(pools.p0) == pytest.approx(100)
    pools.p0.prefilled(4000, 0.8)
    assert pools.prefill_us(pools.p0) == pytest.approx(200, rel=0.01)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 1e9])
def test_nonsense_from_the_wire_is_dropped(pools: Pools, seconds: float) -> None:
    pools.d0.received(1000, seconds)
    pools.p0.sent(D0, 1000, seconds)
    pools.d0.decoded(1, 0, 1.0)
    assert pools.pace(pools.d0) == START_PACE
    assert pools.p0.transfer_to == {}


def test_short_prompts_do_not_make_a_worker_slow(pools: Pools) -> None:
    """A step costs 30 ms however few tokens it computes, a handoff 5 ms however few it moves."""
    pools.p0.prefilled(10_000, 1.0)
    pools.d0.received(10_000, 1.0)
    for _ in range(100):
        pools.d0.prefilled(20, 0.03)
        pools.d0.received(32, 0.005)
        pools.p0.sent(D0, 32, 0.005)
    assert pools.prefill_us(pools.d0) == pytest.approx(100)
    assert pools.pace(pools.d0).transfer_s_per_token == pytest.approx(100e-6, rel=0.1)
    assert pools.p0.transfer_to == {}


def test_all_prefills_in_no_time_leave_a_rate_that_can_be_divided_by(pools: Pools) -> None:
    pools.p0.prefilled(10**9, 0.0)
    assert pools.pace(pools.p0).prefill_s_per_token > 0


def test_transfer_and_reservation(pools: Pools) -> None:
    for _ in range(20):
        pools.d0.reserved(0.004)
        pools.d0.received(4000, 0.4)
        pools.d1.received(4000, 0.1)
        pools.p0.sent(D0, 4000, 0.2)
        pools.p1.sent(D0, 4000, 0.6)
    assert pools.pace(pools.d0).transfer_s_per_token == pytest.approx(100e-6, rel=0.05)
    assert pools.pace(pools.d0).reserve_s == pytest.approx(0.004)
    assert pools.pace(pools.d1).reserve_s == pytest.approx(0.004)
    assert pools.p0.transfer_to[D0] == pytest.approx(50e-6, rel=0.05)
    assert pools.p1.transfer_to[D0] == pytest.approx(150e-6, rel=0.05)


def test_lives_that_ended_long_ago_are_forgotten(pools: Pools) -> None:
    for epoch in range(1000):
        pools.p0.sent(("d0", epoch), 1000, 0.01)
    assert len(pools.p0.transfer_to) == 256
    assert ("d0", 999) in pools.p0.transfer_to


def test_a_worker_without_requests_soon_counts_as_its_peers_after_a_busy_time(pools: Pools) -> None:
    """Else all requests would go to the one that went on getting some."""
    for _ in range(1000):
        for worker in (pools.d0, pools.d1):
            worker.reserved(0.16)
            worker.decoded(64, 8, 8 * 0.08)
    for _ in range(120):
        for _ in range(100):
            pools.d0.reserved(0.004)
            pools.d0.decoded(64, 8, 8 * 0.02)
        pools.clock.advance(1)
    busy, idle = pools.pace(pools.d0), pools.pace(pools.d1)
    assert busy.reserve_s < 0.01
    assert idle.reserve_s < 1.5 * busy.reserve_s
    assert busy.tpot_at_s(64) == pytest.approx(0.02, rel=0.1)
    assert idle.tpot_at_s(64) < 0.03


class TestTpot:
    @pytest.mark.parametrize("sizes", [(213,), (150, 213), (1, 40, 100, 200, 600)])
    def test_of_steps_that_take_the_same_at_any_size(self, pools: Pools, sizes: tuple[int, ...]) -> None:
        for _ in range(200):
            for batch in sizes:
                pools.d0.decoded(batch, 8, 8 * 0.02)
            pools.clock.advance(0.3)
        for batch in sizes:
            assert pools.pace(pools.d0).tpot_at_s(batch) == pytest.approx(0.02, rel=0.03)

    def test_of_tokens_that_came_all_at_once_does_not_stay_at_nothing(self, pools: Pools) -> None:
        pools.d0.decoded(5, 8, 0.0)
        for _ in range(300):
            assert pools.pace(pools.d0).tpot_at_s(5) >= 0
            for batch in (4, 6, 8):
                pools.d0.decoded(batch, 8, 8 * 0.02)
        assert pools.pace(pools.d0).tpot_at_s(5) == pytest.approx(0.02, rel=0.15)

    def test_of_steps_that_grow_with_the_batch(self, pools: Pools) -> None:
        for _ in range(200):
            for batch in (20, 50, 90, 120):
                pools.d0.decoded(batch, 8, 8 * (0.01 + 0.001 * batch))
            pools.clock.advance(0.3)
        pace = pools.pace(pools.d0)
        for batch in (20, 50, 70, 90, 120):
            assert pace.tpot_at_s(batch) == pytest.approx(0.01 + 0.001 * batch, rel=0.12)

    def test_of_each_batch_size_by_itself(self, pools: Pools) -> None:
        for _ in range(50):
            pools.d0.decoded(1, 64, 64 * 0.01)
            pools.d0.decoded(8, 64, 64 * 0.04)
        pace = pools.pace(pools.d0)
        assert pace.tpot_at_s(1) == pytest.approx(0.01, rel=0.1)
        assert pace.tpot_at_s(8) == pytest.approx(0.04, rel=0.1)
        assert pace.tpot_at_s(1) < pace.tpot_at_s(2) < pace.tpot_at_s(4) < pace.tpot_at_s(6) < pace.tpot_at_s(8)

    def test_of_sizes_not_seen_yet_in_proportion_to_the_nearest(self, pools: Pools) -> None:
        pools.d0.decoded(8, 640, 640 * 0.02)
        assert pools.pace(pools.d1).tpot_at_s(64) == pytest.approx(0.02 * batch_shape(64) / batch_shape(8))

    @pytest.mark.parametrize("batch", [1, 2, 3, 7, 33, 1024, 5000])
    def test_grows_with_the_batch_from_the_start(self, batch: int) -> None:
        assert START_PACE.tpot_at_s(batch + 1) > START_PACE.tpot_at_s(batch)
        assert START_PACE.tpot_at_s(batch) == pytest.approx(START_TPOT_S * batch_shape(batch), rel=0.01)

    def test_of_an_empty_or_endless_batch_is_kept_at_the_ends(self, pools: Pools) -> None:
        pools.d0.decoded(0, 10, 0.1)
        pools.d0.decoded(10**6, 10, 10.0)
        assert START_PACE.tpot_at_s(0) == START_PACE.tpot_at_s(1)


def test_answer_length_is_the_mean_of_late_answers(pools: Pools) -> None:
    for tokens in (10, 20, 30):
        pools.estimates.answered("m", tokens)
    assert pools.estimates.answer_tokens("m") == 20
    assert pools.estimates.answer_tokens("other") == START_ANSWER_TOKENS
