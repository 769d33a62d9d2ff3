"""The simulator against what can be worked out by hand, and against itself without its shortcuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from planner.cost import PrefillWork
from planner.shared_host import HostCores
from planner.simulator import worker as worker_module
from planner.simulator.links import SimPort, push
from planner.simulator.result import SimResult
from planner.simulator.scheduler import RepeatingScheduler, SimBlockPool
from planner.simulator.sequence import SimSequence, TokenCount, TraceBlockHashes
from planner.simulator.setup import Fault, FaultKind, PoolSetup, Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.arrivals import Gamma
from planner.traces.hits import infinite_cache_hits
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import PrefixBlocks, TrafficTrace
from tandem.config.router import ClassSpec, Disaggregation, PolicyName, RouterSpec
from tandem.errors import ConfigError
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.scheduler.batching import BatchRule

PER_TOKEN_S, STEP_S, BYTE_S, KV_BYTES, LAYERS, KV_HEADS, HOP_S = 1e-4, 0.01, 1e-9, 100_000, 10, 8, 0.0003


@dataclass(frozen=True)
class FlatCost:
    """A token of a prompt takes 0.1 ms, a decode step 10 ms whatever is in it, a byte a nanosecond."""

    fit_error: float | None = None

    def prefill_s(self, tokens: int, context: int) -> float:
        return PER_TOKEN_S * tokens

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return STEP_S if batch else 0.0

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        return sum(PER_TOKEN_S * work.tokens for work in prefills) + (STEP_S if batch else 0.0)

    def transfer_s(self, num_bytes: int) -> float:
        return num_bytes * BYTE_S


CLASSES = (ClassSpec(name="interactive"), ClassSpec(name="batch", batch=True))


def setup_of(prefill: int, decode: int, **changes: object) -> Setup:
    pool = PoolSetup(prefill, 1, FlatCost(), 200_000)
    spec = RouterSpec(disaggregation=Disaggregation.ALWAYS, max_queued_requests=4096, classes=CLASSES)
    decoding = replace(pool, workers=decode)
    base = Setup(pool if prefill else None, decoding, LAYERS, KV_HEADS, KV_BYTES, spec, max_step_tokens=4096)
    return replace(base, **changes)  # type: ignore[arg-type]


def one(prompt: int, output: int, *more: tuple[float, int, int]) -> TrafficTrace:
    rows = np.array([(0.0, prompt, output), *more])
    return TrafficTrace("hand", rows[:, 0], rows[:, 1].astype(np.int64), rows[:, 2].astype(np.int64))


def traffic(count: int = 200, rate: float = 8.0) -> TrafficTrace:
    shared = SharedPrefixes(count=5, tokens=640, share=0.7)
    lengths = LengthSpec(300, 0.8, 3000), LengthSpec(40, 0.7, 400)
    return synthetic_trace(count, Gamma(rate, 1.5), *lengths, prefixes=shared, seed=3)


def ended(result: SimResult) -> int:
    return result.finished + result.rejected + result.failed


class TestOneRequest:
    def test_by_hand_on_an_aggregated_worker(self) -> None:
        result = simulate(one(1000, 11), setup_of(0, 1))
        # A frame there, the prompt, a frame back; then ten steps of one token each.
        assert result.ttft_s.p50 == pytest.approx(2 * HOP_S + 1000 * PER_TOKEN_S)
        assert result.tpot_s.p50 == pytest.approx(STEP_S)
        assert result.e2e_s.p50 == pytest.approx(2 * HOP_S + 1000 * PER_TOKEN_S + 10 * STEP_S)

    def test_by_hand_through_a_handoff(self) -> None:
        result = simulate(one(1000, 11), setup_of(1, 1))
        # Reserve, reserved, prefill, first token: four frames. The first token does not wait for the blocks.
        assert result.ttft_s.p50 == pytest.approx(4 * HOP_S + 1000 * PER_TOKEN_S)
        moved_s = 1000 * KV_BYTES * BYTE_S
        assert result.kv_bytes_moved == 1000 * KV_BYTES
        # As long as computing: all but the last layer's blocks are hidden behind it.
        exposed_s = moved_s / LAYERS + HOP_S
        assert result.tpot_s.p50 == pytest.approx(STEP_S + (exposed_s - HOP_S) / 10, rel=0.01)

    def test_a_single_token_needs_no_handoff(self) -> None:
        result = simulate(one(1000, 1), setup_of(1, 1))
        assert result.finished == 1
        assert result.tpot_s.p50 is None

    def test_a_prompt_no_worker_can_hold_is_rejected(self) -> None:
        result = simulate(one(500_000, 5, (1.0, 100, 5)), setup_of(1, 1))
        assert (result.rejected, result.finished) == (1, 1)
        assert result.refusals == {"context_length_exceeded": 1}


def test_workers_of_one_host_take_turns_with_its_cores() -> None:
    two_at_once = one(1000, 1, (0.0, 1000, 1))
    alone, sharing = (simulate(two_at_once, setup_of(0, 2, host=HostCores(cores))).ttft_s.p90 for cores in (2, 1))
    assert alone == pytest.approx(2 * HOP_S + 1000 * PER_TOKEN_S)
    assert sharing == pytest.approx(2 * HOP_S + 2 * 1000 * PER_TOKEN_S)


def test_other_processes_of_a_host_delay_what_they_handle() -> None:
    costs = HostCores(8, request_s=0.01, token_s=0.001, handoff_s=0.02, kv_byte_s=1e-3 / KV_BYTES / 1000)
    free, taken = (simulate(one(1000, 11), setup_of(1, 1, host=host)) for host in (HostCores(8), costs))
    assert free.ttft_s.p50 is not None
    assert free.e2e_s.p50 is not None
    assert taken.ttft_s.p50 == pytest.approx(free.ttft_s.p50 + 0.01)
    assert taken.e2e_s.p50 == pytest.approx(free.e2e_s.p50 + 0.01 + 0.02 + 0.001, rel=0.01)


def test_tokens_take_their_time_on_a_host_whose_cores_all_compute() -> None:
    hosts = (HostCores(1), HostCores(1, token_s=0.001), HostCores(1, frame_s=0.0007, token_s=0.0003))
    free, *taken = (simulate(one(16, 101), setup_of(0, 1, host=host)).tpot_s.p50 for host in hosts)
    assert free is not None
    assert taken == pytest.approx([free + 0.001, free + 0.001], rel=0.01)


def test_tokens_of_a_step_share_their_frame() -> None:
    host, together = HostCores(1, frame_s=0.001), one(16, 101, *4 * [(0.0, 16, 101)])
    free, taken = (simulate(together, setup_of(0, 1, host=host)).tpot_s.p50 for host in (HostCores(1), host))
    assert free is not None
    assert taken == pytest.approx(free + 0.001, rel=0.01)


def test_waiting_is_what_queueing_theory_says() -> None:
    """M/D/1: one worker, one prompt a step, one token each. Mean wait = rho * D / (2 * (1 - rho))."""
    load, service_s = 0.7, 0.1
    trace = synthetic_trace(4_000, Gamma(load / service_s), LengthSpec(1000), LengthSpec(1), seed=5)
    one_a_step = RouterSpec(max_prefill_tokens_in_flight=1, max_queued_requests=4096, classes=CLASSES)
    result = simulate(trace, setup_of(0, 1, router=one_a_step, max_step_tokens=1000, network_s=0.0, block_tokens=64))
    expected_s = service_s + load * service_s / (2 * (1 - load))
    assert result.ttft_s.mean == pytest.approx(expected_s, rel=0.1)
    assert result.pools["decode"].busy == pytest.approx(load, rel=0.05)


class TestBatching:
    """Four requests at once, of 11 to 101 tokens, and one a moment later, on a worker that runs four."""

    TRACE = one(100, 11, (0.0, 100, 41), (0.0, 100, 71), (0.0, 100, 101), (0.1, 100, 2))

    def run(self, batches: BatchRule | None) -> SimResult:
        base = setup_of(0, 1)
        return simulate(self.TRACE, replace(base, decode=replace(base.decode, batches=batches, max_running_requests=4)))

    def test_by_hand(self) -> None:
        continuous, full = self.run(None), self.run(BatchRule(4, 0.5, from_first=False))
        frames_s, prompt_s = 2 * HOP_S, 100 * PER_TOKEN_S
        # The first one is computed alone, the next three beside its second token, the last when the first has ended.
        first_s = prompt_s + frames_s, 4 * prompt_s + STEP_S + frames_s
        last_s = 4 * prompt_s + 10 * STEP_S + prompt_s + STEP_S + frames_s - 0.1
        assert continuous.ttft_s.mean == pytest.approx((first_s[0] + 3 * first_s[1] + last_s) / 5)
        # All four at once, and the last when the longest has ended.
        last_s = 4 * prompt_s + 100 * STEP_S + prompt_s + frames_s - 0.1
        assert full.ttft_s.mean == pytest.approx((4 * (4 * prompt_s + frames_s) + last_s) / 5)

    def test_a_batch_that_is_not_full_waits_for_its_window(self) -> None:
        rest = 500 * PER_TOKEN_S + 100 * STEP_S + 2 * HOP_S
        static, dynamic = (self.seconds_of_five(BatchRule(8, 0.5, from_first)) for from_first in (False, True))
        assert static == pytest.approx(0.1 + 0.5 + rest, rel=0.01)
        assert dynamic == pytest.approx(0.5 + rest, rel=0.01)

    def seconds_of_five(self, batches: BatchRule) -> float:
        base = setup_of(0, 1)
        return simulate(self.TRACE, replace(base, decode=replace(base.decode, batches=batches))).seconds

    def test_all_requests_end_under_load_and_with_shared_prompts(self) -> None:
        """`simulate` checks that no block is left."""
        setup = setup_of(0, 2)
        small = replace(setup.decode, max_running_requests=8, kv_tokens=8_000)
        outcomes = [
            simulate(traffic(150, 20.0), replace(setup, decode=replace(small, batches=batches)))
            for batches in (None, BatchRule(8, 0.2, from_first=True), BatchRule(8, 0.2, from_first=False))
        ]
        assert [each.finished for each in outcomes] == [150] * 3
        assert outcomes[0].seconds < min(outcomes[1].seconds, outcomes[2].seconds)


class TestShortcuts:
    def test_repeated_steps_leave_what_single_steps_leave(self) -> None:
        schedulers = [RepeatingScheduler(SimBlockPool(64), 4, 8, 64, 1 << 20) for _ in range(2)]
        for scheduler in schedulers:
            for number, prompt in enumerate((5, 8, 3)):
                tokens = TokenCount(prompt)
                scheduler.add(
                    SimSequence(
                        str(number), tokens, prompt, SamplingParams(max_tokens=50), HashKey("m"), 4, number,
                        index=number, trace_hashes=TraceBlockHashes(None, 4), counted=tokens,
                    )
                )  # fmt: skip
        repeated, single = schedulers
        for scheduler in schedulers:
            _step(scheduler)
        steps = repeated.steady_steps(100)
        assert steps == 49
        repeated.repeat(steps)
        for _ in range(steps):
            _step(single)
        states = [
            [(each.computed, len(each.tokens), each.committed) for each in scheduler.decoding]
            for scheduler in schedulers
        ]
        assert states[0] == states[1]
        assert repeated.pool.counts() == single.pool.counts()
        assert sum(len(each.hashes) for each in repeated.pool.take_events()) == sum(
            len(each.hashes) for each in single.pool.take_events()
        )

    def test_a_run_with_repeated_steps_is_the_run_without_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trace, setup = traffic(120), setup_of(1, 2)
        quick = simulate(trace, setup)
        monkeypatch.setattr(worker_module, "MAX_REPEATED_STEPS", 1)
        slow = simulate(trace, setup)
        assert quick.ttft_s.p99 == pytest.approx(slow.ttft_s.p99, rel=0.02)
        assert quick.tpot_s.p90 == pytest.approx(slow.tpot_s.p90, rel=0.02)
        assert quick.itl_s.p50 == pytest.approx(slow.itl_s.p50, rel=0.021)
        assert quick.seconds == pytest.approx(slow.seconds, rel=0.01)

    def test_without_shared_prompts_caches_change_nothing(self) -> None:
        trace = replace(traffic(150), prefixes=None)
        lone = np.arange(150)
        own = replace(trace, prefixes=replace(_prefixes(), ids=lone, ends=lone + 1))
        assert simulate(trace, setup_of(1, 1)).e2e_s == simulate(own, setup_of(1, 1)).e2e_s


def _prefixes() -> PrefixBlocks:
    found = traffic(150).prefixes
    assert found is not None
    return found


def _step(scheduler: RepeatingScheduler) -> None:
    plan = scheduler.schedule()
    scheduler.advance(plan)
    for chunk in plan.chunks:
        if chunk.samples:
            chunk.sequence.tokens.append(0)


class TestCaches:
    def test_slow_traffic_on_one_worker_hits_all_that_an_infinite_cache_would(self) -> None:
        trace = traffic(200, rate=0.3)
        # An answer's first block holds the end of a prompt: only whole blocks are found again.
        assert simulate(trace, setup_of(0, 1)).hit_rate == pytest.approx(
            infinite_cache_hits(trace).token_hit_rate, rel=1e-9
        )

    def test_coarser_bookkeeping_finds_nearly_the_same(self) -> None:
        trace = traffic(200, rate=0.3)
        coarse = simulate(trace, setup_of(0, 1, block_tokens=64)).hit_rate
        assert coarse == pytest.approx(infinite_cache_hits(trace).token_hit_rate, rel=0.05)

    def test_a_router_without_redis_keeps_what_it_knew_and_serves_on(self) -> None:
        faults = (Fault(FaultKind.REDIS, 1.0, for_s=10.0),)
        lost, whole = simulate(traffic(), setup_of(1, 2, faults=faults)), simulate(traffic(), setup_of(1, 2))
        assert lost.finished == 200
        assert lost.hit_rate <= whole.hit_rate


class TestFaults:
    @pytest.mark.parametrize("worker", ["decode-0", "prefill-0"])
    def test_a_lost_workers_requests_go_on_elsewhere(self, worker: str) -> None:
        long_prompts = one(20_000, 100, *((0.01 * number, 20_000, 100) for number in range(1, 12)))
        # Each takes a prefill worker 2 s: by then the first decode, and the next are being computed.
        faults = (Fault.parse(f"worker:{worker}@2.5+5"),)
        in_turn = RouterSpec(policy=PolicyName.ROUND_ROBIN, disaggregation=Disaggregation.ALWAYS, classes=CLASSES)
        result = simulate(long_prompts, setup_of(2, 2, faults=faults, router=in_turn))
        assert result.finished == 12
        assert result.migrated > 0

    def test_only_what_was_not_answered_yet_is_answered_elsewhere(self) -> None:
        never = RouterSpec(disaggregation=Disaggregation.NEVER, classes=CLASSES)
        lost_at_s = 2 * HOP_S + 1000 * PER_TOKEN_S + 50.5 * STEP_S
        faults = tuple(Fault(FaultKind.WORKER, lost_at_s, f"decode-{number}", 0.001) for number in (0, 1))
        result = simulate(one(1000, 101), setup_of(0, 2, router=never, faults=faults))
        assert result.finished == result.migrated == 1
        again_s = (1000 + 51) * PER_TOKEN_S + 49 * STEP_S
        assert result.e2e_s.p50 == pytest.approx(lost_at_s + again_s, rel=0.02)

    def test_a_worker_that_came_back_is_one_that_was_busy_until_its_loss(self) -> None:
        lost_at_s = 2 * HOP_S + 1000 * PER_TOKEN_S + 50.5 * STEP_S
        faults = (Fault(FaultKind.WORKER, lost_at_s, "decode-0", 0.001),)
        result = simulate(one(1000, 101), setup_of(0, 1, faults=faults))
        again_s = (1000 + 51) * PER_TOKEN_S + 49 * STEP_S
        found = result.pools["decode"]
        assert found.workers == 1
        assert found.busy == found.busiest
        assert found.busy * result.seconds == pytest.approx(lost_at_s + again_s, rel=0.01)

    def test_a_prompt_at_which_a_worker_is_lost_kept_it_busy(self) -> None:
        faults = (Fault(FaultKind.WORKER, 1.0, "decode-0"),)
        result = simulate(one(20_000, 2), setup_of(0, 2, faults=faults))
        assert result.pools["decode"].busiest * result.seconds == pytest.approx(2.0, rel=0.01)
        assert result.pools["decode"].busy * result.seconds == pytest.approx(1.5, rel=0.01)

    def test_a_pool_that_is_lost_for_good_leaves_nobody_waiting_for_ever(self) -> None:
        result = simulate(traffic(), setup_of(1, 1, faults=(Fault.parse("worker:decode-0@6"),)))
        assert ended(result) == 200
        assert result.refusals["no_worker"] > 0

    def test_a_slow_link_exposes_the_handoff(self) -> None:
        faults = (Fault.parse("link:prefill-0@0+1000*4"),)
        slow, whole = simulate(traffic(), setup_of(1, 2, faults=faults)), simulate(traffic(), setup_of(1, 2))
        assert slow.finished == whole.finished == 200
        assert slow.tpot_s.p90 is not None
        assert whole.tpot_s.p90 is not None
        assert slow.tpot_s.p90 > 1.5 * whole.tpot_s.p90

    @pytest.mark.parametrize(
        "text",
        [
            "worker@3",
            "redis:x@3",
            "link:prefill-0@3*0.5",
            "worker:a@-1",
            "worker:a@nan",
            "link:a@0*inf",
            "fire@3",
            "x",
            "worker:decode-0@30+10*4",
            "worker:decode-0@30*1",
            "redis@30*8",
            "link:prefill-0@30+20",
            "link:prefill-0@30+20*",
            "link:prefill-0@30+20*1",
        ],
    )
    def test_a_fault_of_no_known_form_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="expected one of the forms"):
            Fault.parse(text)

    @pytest.mark.parametrize("second", ["@3.5", "@4+1", "@3"])
    def test_the_loss_of_a_worker_that_is_lost_already_changes_nothing(self, second: str) -> None:
        faults = tuple(Fault.parse(f"worker:decode-1{when}") for when in ("@3", second))
        result = simulate(traffic(), setup_of(1, 2, faults=faults))
        assert result.finished == 200

    def test_a_fault_of_a_worker_there_is_not_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="decode-0"):
            simulate(traffic(), setup_of(1, 1, faults=(Fault.parse("worker:decode-7@1"),)))


class TestRuns:
    def test_the_same_run_twice_is_the_same(self) -> None:
        assert simulate(traffic(), setup_of(2, 2)) == simulate(traffic(), setup_of(2, 2))

    @pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 2)])
    def test_every_request_ends_even_under_far_too_much_load(self, prefill: int, decode: int) -> None:
        setup = setup_of(prefill, decode, max_running_requests=8)
        tight = replace(setup, decode=replace(setup.decode, kv_tokens=8000))
        assert ended(simulate(traffic(rate=60.0), tight)) == 200

    def test_objectives_are_attained_by_finished_requests_alone(self) -> None:
        slo = Slo(ttft_s=0.2, tpot_s=0.012)
        result = simulate(traffic(rate=20.0), setup_of(1, 1), slo)
        found = result.attainment
        assert found.ttft is not None
        assert found.tpot is not None
        assert found.joint is not None
        assert max(0.0, found.ttft + found.tpot - 1) <= found.joint <= min(found.ttft, found.tpot) < 1
        assert result.goodput_per_s == pytest.approx(found.joint * result.requests_per_s)

    def test_a_run_that_cannot_attain_its_objectives_ends_early(self) -> None:
        result = simulate(traffic(rate=60.0), setup_of(1, 1), Slo(ttft_s=0.01), most_misses=20)
        assert not result.complete
        assert ended(result) < 200

    @pytest.mark.parametrize("slo", [Slo(0.2, 0.012), Slo(ttft_s=0.2), Slo(tpot_s=0.012)])
    def test_it_ends_with_the_first_miss_too_many(self, slo: Slo) -> None:
        """A request that misses both objectives misses once."""
        whole = simulate(traffic(rate=20.0), setup_of(1, 1), slo)
        assert whole.attainment.joint is not None
        misses = round(200 * (1 - whole.attainment.joint))
        assert 0 < misses < 200
        assert simulate(traffic(rate=20.0), setup_of(1, 1), slo, most_misses=misses) == whole
        assert not simulate(traffic(rate=20.0), setup_of(1, 1), slo, most_misses=misses - 1).complete


class TestLargePools:
    def test_a_shortlist_serves_as_well_as_the_whole_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trace = traffic(150, rate=100.0)
        small = PoolSetup(20, 1, FlatCost(), 20_000)
        setup = replace(setup_of(20, 20), prefill=small, decode=small)
        whole = simulate(trace, setup)
        monkeypatch.setattr("planner.simulator.fleet.WHOLE_POOL", 19)
        monkeypatch.setattr("planner.simulator.fleet.SHORTLIST", 16)
        listed = simulate(trace, setup)
        assert listed.finished == whole.finished == 150
        assert listed.ttft_s.p90 == pytest.approx(whole.ttft_s.p90, rel=0.1)
        assert listed.hit_rate == pytest.approx(whole.hit_rate, rel=0.1)


class TestLinks:
    def test_blocks_that_are_there_take_the_links_time(self) -> None:
        assert arrives_s(0.5, start_s=1, end_s=1) == 1.5

    def test_a_fast_link_exposes_the_last_layer_only(self) -> None:
        assert arrives_s(0.5, end_s=1) == pytest.approx(1.05)

    def test_a_slow_link_starts_with_the_first_layer(self) -> None:
        assert arrives_s(5, end_s=1) == pytest.approx(5.1)

    def test_one_range_after_the_other_on_either_end(self) -> None:
        source = SimPort()
        arrives_s(2, source=source)
        assert arrives_s(1, source=source) == 3

    def test_a_slow_port_delays_its_own_ranges_only(self) -> None:
        source, target = SimPort(), SimPort()
        assert arrives_s(1, 4, source=source, target=target) == 4
        assert arrives_s(1, 4, source=source) == 5
        assert arrives_s(1, 4, source=source, target=target) == 8

    @pytest.mark.parametrize(
        ("prefill_tp", "decode_tp", "kv_heads", "sent", "received", "moved"),
        [
            (1, 1, 8, 1, 1, 1),
            (4, 4, 8, 1 / 4, 1 / 4, 1),
            (4, 1, 8, 1 / 4, 1, 1),
            (2, 8, 8, 1 / 2, 1 / 8, 1),
            (8, 8, 1, 1, 1, 8),
            (8, 2, 1, 1, 1, 2),
            (2, 8, 1, 4, 1, 8),
            (4, 8, 2, 2 / 2, 1 / 2, 4),
            (8, 4, 2, 1 / 2, 1 / 2, 2),
        ],
    )
    def test_a_handoff_takes_as_long_as_its_busiest_rank(
        self, prefill_tp: int, decode_tp: int, kv_heads: int, sent: float, received: float, moved: float
    ) -> None:
        pool = PoolSetup(1, 1, FlatCost(), 200_000)
        prefill, decode = (replace(pool, tp=tp) for tp in (prefill_tp, decode_tp))
        setup = replace(setup_of(1, 1), prefill=prefill, decode=decode, kv_heads=kv_heads)
        result = simulate(one(1000, 11), setup)
        whole_s = 1000 * KV_BYTES * BYTE_S
        assert result.kv_bytes_moved == moved * 1000 * KV_BYTES
        assert result.pools["prefill"].sent * result.seconds == pytest.approx(sent * whole_s)
        assert result.pools["decode"].received * result.seconds == pytest.approx(received * whole_s)
        prompt_s, handoff_s = 1000 * PER_TOKEN_S, max(sent, received) * whole_s
        exposed_s = max(prompt_s / LAYERS + handoff_s - prompt_s, handoff_s / LAYERS)
        assert result.tpot_s.p50 == pytest.approx(STEP_S + exposed_s / 10, rel=0.01)


def arrives_s(
    send_s: float,
    receive_s: float | None = None,
    *,
    start_s: float = 0.0,
    end_s: float = 0.0,
    source: SimPort | None = None,
    target: SimPort | None = None,
) -> float:
    """`receive_s` None: as `send_s`."""
    ports, receive_s = (source or SimPort(), target or SimPort()), send_s if receive_s is None else receive_s
    return push(*ports, start_s=start_s, end_s=end_s, layers=10, send_s=send_s, receive_s=receive_s, num_bytes=1)
