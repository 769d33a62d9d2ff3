"""Worker health as facts and time change it: who is left out, for how long, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from router.prefix_index.mirror import WorkerKey
from router.probes.health_watch import HealthWatch
from router.workers.health import (
    TIME_GRAIN_S,
    EjectReason,
    HealthAction,
    HealthBoard,
    HealthRules,
    HealthState,
    MigrateRequests,
    Pool,
    SendCanary,
    Silence,
    WorkerHealth,
)
from router.workers.silence_limit import FIRST_GUESS_S_PER_TOKEN, SAFETY, STEP_TOKENS, Progress
from tandem.config.model import Role
from tandem.errors import InternalError

RULES = HealthRules()
KEYS = [WorkerKey(f"d{number}", 1) for number in range(8)]
D0, D1, D2, D3 = KEYS[:4]
LIMIT_S = 5.0


def board_of(workers: int) -> HealthBoard:
    board = HealthBoard()
    for key in KEYS[:workers]:
        board.add(key, "tiny", Role.DECODE)
        board.set_up(key, is_up=True)
    return board


def silent(key: WorkerKey, silent_s: float) -> Silence:
    return Silence(key, silent_s, LIMIT_S)


def fail(board: HealthBoard, key: WorkerKey, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        board.failed(key, now_s)


def canaries(actions: list[HealthAction]) -> list[WorkerKey]:
    return [action.key for action in actions if isinstance(action, SendCanary)]


@pytest.mark.parametrize(
    ("silent_s", "state", "moves", "admits"),
    [
        (0.0, HealthState.HEALTHY, False, True),
        (2.5, HealthState.HEALTHY, False, True),
        (2.6, HealthState.SUSPECT, False, False),
        (4.99, HealthState.SUSPECT, False, False),
        (5.0, HealthState.EJECTED, True, False),
    ],
)
def test_a_silent_worker_gets_nothing_new_and_is_then_out(
    silent_s: float, state: HealthState, moves: bool, admits: bool
) -> None:
    board = board_of(2)
    actions = board.check(100.0, [silent(D0, silent_s)])
    assert (board.state(D0), board.admits(D0, 0)) == (state, admits)
    assert actions == ([MigrateRequests(D0, silent_s)] if moves else [])
    assert board.state(D1) is HealthState.HEALTHY


def test_one_that_speaks_again_in_time_is_healthy_without_a_canary() -> None:
    board = board_of(2)
    board.check(0.0, [silent(D0, 3.0)])
    assert board.check(0.5, [silent(D0, 0.1)]) == []
    assert board.state(D0) is HealthState.HEALTHY
    assert not board.ejected


def test_the_last_worker_that_is_silent_still_gets_requests_until_it_is_out() -> None:
    board = board_of(1)
    board.check(0.0, [silent(D0, 3.0)])
    assert board.state(D0) is HealthState.SUSPECT
    assert board.admits(D0, 5)
    board.check(3.0, [silent(D0, 6.0)])
    assert not board.admits(D0, 0)


def test_stuck_workers_are_out_however_many_they_are() -> None:
    board = board_of(3)
    moved = board.check(0.0, [silent(key, 6.0) for key in KEYS[:2]])
    assert moved == [MigrateRequests(key, 6.0) for key in KEYS[:2]]
    assert board.check(1.0, [silent(D2, 6.0)]) == [SendCanary(D0), SendCanary(D1)]
    assert board.ejected == {(Role.DECODE, EjectReason.STALLED): 3}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_that_are_all_stuck_keep_their_requests_until_one_can_take_them(workers: int) -> None:
    board = board_of(workers)
    stuck = KEYS[:workers]
    assert board.check(0.0, [silent(key, 5.5) for key in stuck]) == []
    assert board.check(0.5, [silent(key, 6.0) for key in stuck]) == []
    board.add(D3, "tiny", Role.DECODE)
    board.set_up(D3, is_up=True)
    assert board.check(0.75, [silent(key, 6.25) for key in stuck]) == [MigrateRequests(key, 6.25) for key in stuck]


def test_requests_of_one_that_is_stuck_for_good_leave_it_although_nobody_takes_them() -> None:
    board = board_of(1)
    hopeless_s = RULES.hopeless_factor * LIMIT_S
    for at_s in range(6, int(hopeless_s) + 1):
        actions = board.check(float(at_s), [silent(D0, float(at_s))])
        assert actions in ([], [SendCanary(D0)])
        if actions:
            board.canary_ended(D0, float(at_s), passed=False)
    assert MigrateRequests(D0, hopeless_s + 1) in board.check(hopeless_s + 1, [silent(D0, hopeless_s + 1)])
    assert board.ejected == {(Role.DECODE, EjectReason.STALLED): 1}


@pytest.mark.parametrize("frozen_s", [1.0, 30.0, 300.0])
@pytest.mark.acceptance(3, here="virtual time")
def test_after_a_freeze_a_worker_is_back_within_five_seconds(frozen_s: float) -> None:
    """A canary that waits in the frozen worker is answered when it goes on; others failed after five seconds."""
    board = board_of(2)
    board.check(0.0, [silent(D0, 6.0)])
    now_s, sent_s = 0.0, None
    while now_s < frozen_s or sent_s is None:
        now_s += 0.25
        if sent_s is not None and now_s - sent_s >= 5.0:
            board.canary_ended(D0, now_s, passed=False)
            sent_s = None
        sent_s = now_s if canaries(board.check(now_s, [])) else sent_s
    thawed_s = now_s
    board.canary_ended(D0, now_s, passed=True)
    assert board.admits(D0, 0)
    while board.state(D0) is not HealthState.HEALTHY:
        now_s += 0.25
        board.succeeded(D0, now_s, None)
    assert now_s - thawed_s <= 5.0
    assert now_s - max(frozen_s, 1.0) <= 6.5


@pytest.mark.parametrize(
    ("failures", "state"),
    [
        (RULES.suspect_failures - 1, HealthState.HEALTHY),
        (RULES.suspect_failures, HealthState.SUSPECT),
        (RULES.eject_failures - 1, HealthState.SUSPECT),
        (RULES.eject_failures, HealthState.EJECTED),
    ],
)
def test_failures_in_a_row_make_suspect_and_then_eject(failures: int, state: HealthState) -> None:
    board = board_of(2)
    fail(board, D0, failures)
    assert board.state(D0) is state
    assert board.admits(D0, 0) == (state is not HealthState.EJECTED)


def test_a_success_between_failures_clears_them() -> None:
    board = board_of(2)
    fail(board, D0, 4)
    board.succeeded(D0, 0.0, None)
    assert board.state(D0) is HealthState.HEALTHY
    fail(board, D0, 2)
    assert board.state(D0) is HealthState.HEALTHY


@pytest.mark.parametrize(("pool", "out"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_never_more_than_half_of_a_pool_and_never_the_last_one_is_ejected_for_failures(pool: int, out: int) -> None:
    board = board_of(pool)
    for key in KEYS[:pool]:
        fail(board, key, 50)
    assert board.counts()[Role.DECODE, HealthState.EJECTED] == out


def test_pools_of_another_role_or_model_do_not_count() -> None:
    board = board_of(1)
    for key, model, role in ((D1, "tiny", Role.PREFILL), (D2, "other", Role.DECODE)):
        board.add(key, model, role)
        board.set_up(key, is_up=True)
    fail(board, D0, 50)
    assert board.state(D0) is HealthState.SUSPECT


def test_workers_whose_link_is_down_do_not_count() -> None:
    board = board_of(2)
    board.set_up(D1, is_up=False)
    fail(board, D0, 50)
    assert board.state(D0) is HealthState.SUSPECT


def test_a_suspect_is_asked_with_one_canary_at_a_time_and_a_failed_one_ejects() -> None:
    board = board_of(2)
    fail(board, D0, RULES.suspect_failures)
    assert canaries(board.check(1.0, [])) == [D0]
    assert canaries(board.check(9.0, [])) == [], "the first is still out"
    board.canary_ended(D0, 9.0, passed=False)
    assert board.state(D0) is HealthState.EJECTED
    assert board.ejected == {(Role.DECODE, EjectReason.CANARY): 1}


def test_a_canary_that_passed_clears_the_suspect_but_not_its_failures() -> None:
    board = board_of(2)
    fail(board, D0, RULES.suspect_failures)
    board.check(1.0, [])
    board.canary_ended(D0, 1.5, passed=True)
    assert board.state(D0) is HealthState.HEALTHY
    fail(board, D0, RULES.eject_failures - RULES.suspect_failures, 2.0)
    assert board.state(D0) is HealthState.EJECTED


def test_healthy_workers_get_no_canaries() -> None:
    board = board_of(3)
    assert board.check(1.0, []) == board.check(1e6, []) == []


def ejected_again(board: HealthBoard, now_s: float) -> float:
    """Ejects D0 at `now_s`; how long until it is on probation."""
    board.check(now_s, [silent(D0, 6.0)])
    assert board.state(D0) is HealthState.EJECTED
    at_s = now_s
    while board.state(D0) is HealthState.EJECTED:
        at_s += 0.5
        board.check(at_s, [])
    board.canary_ended(D0, at_s, passed=True)
    return at_s - now_s


def test_each_ejection_after_a_stall_lasts_twice_as_long_up_to_four_seconds() -> None:
    """However often it freezes, it is back within 5 s."""
    board = board_of(2)
    now_s, durations = 0.0, []
    for _ in range(9):
        durations.append(ejected_again(board, now_s))
        now_s += durations[-1] + 1.0
    assert durations == [1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]


def test_a_worker_that_was_well_for_long_starts_again_with_a_short_ejection() -> None:
    board = board_of(2)
    now_s = ejected_again(board, 0.0)
    for _ in range(10):
        now_s += RULES.step_s
        board.succeeded(D0, now_s, None)
    assert board.state(D0) is HealthState.HEALTHY
    assert ejected_again(board, now_s + RULES.longest_ejection_s + 1.0) == RULES.step_s


def on_probation(workers: int = 2) -> HealthBoard:
    """D0 is on probation at 100 s; its first canary is out."""
    board = board_of(workers)
    board.check(0.0, [silent(D0, 6.0)])
    assert canaries(board.check(100.0, [])) == [D0]
    assert board.state(D0) is HealthState.PROBATION
    return board


def test_on_probation_a_worker_gets_nothing_before_its_canary_passed_and_then_a_growing_share() -> None:
    board = on_probation()
    assert not board.admits(D0, 0)
    board.canary_ended(D0, 100.0, passed=True)
    shares, now_s = [], 100.0
    while board.state(D0) is HealthState.PROBATION:
        shares.append(next(n for n in range(100) if not board.admits(D0, n)))
        now_s += RULES.step_s
        board.succeeded(D0, now_s, None)
    assert shares == [1, 2, 4, 8, 16]
    assert board.admits(D0, 1000)


def test_a_burst_of_successes_does_not_hurry_the_probation() -> None:
    board = on_probation()
    board.canary_ended(D0, 100.0, passed=True)
    for _ in range(50):
        board.succeeded(D0, 100.5, None)
    assert board.admits(D0, 0)
    assert not board.admits(D0, 1)


def test_an_idle_worker_on_probation_comes_back_by_canaries_alone() -> None:
    board, now_s, sent = on_probation(), 100.0, 1
    board.canary_ended(D0, now_s, passed=True)
    while board.state(D0) is HealthState.PROBATION:
        now_s += 0.25
        for key in canaries(board.check(now_s, [])):
            sent += 1
            board.canary_ended(key, now_s, passed=True)
    assert sent == 6
    assert now_s - 100.0 == 5 * RULES.step_s


@pytest.mark.parametrize("how", ["failure", "canary", "silence"])
def test_trouble_on_probation_ejects_again(how: str) -> None:
    board = on_probation()
    if how == "failure":
        board.canary_ended(D0, 100.0, passed=True)
        board.failed(D0, 101.0)
    elif how == "canary":
        board.canary_ended(D0, 101.0, passed=False)
    else:
        board.canary_ended(D0, 100.0, passed=True)
        assert board.check(101.0, [silent(D0, 6.0)]) == [MigrateRequests(D0, 6.0)]
    assert board.state(D0) is HealthState.EJECTED


def test_an_answer_begun_before_the_ejection_does_not_stand_for_a_canary() -> None:
    board = on_probation()
    board.succeeded(D0, 101.0, None)
    assert not board.admits(D0, 0)


def test_a_refused_canary_says_nothing_and_is_sent_again() -> None:
    board = on_probation()
    board.canary_ended(D0, 100.0, passed=None)
    assert board.state(D0) is HealthState.PROBATION
    assert canaries(board.check(100.5, [])) == []
    assert canaries(board.check(101.0, [])) == [D0]


def test_a_lone_worker_is_asked_again_at_once_and_then_takes_all() -> None:
    board = board_of(1)
    board.check(0.0, [silent(D0, 6.0)])
    assert canaries(board.check(RULES.step_s, [])) == [D0]
    assert not board.admits(D0, 0)
    board.canary_ended(D0, 1.5, passed=False)
    assert board.state(D0) is HealthState.PROBATION, "the last one is not ejected for a canary"
    assert not board.admits(D0, 0)
    assert canaries(board.check(2.5, [])) == [D0]
    board.canary_ended(D0, 2.6, passed=True)
    assert board.admits(D0, 500), "there is nobody to share with"


def measure(board: HealthBoard, latencies_s: dict[WorkerKey, float]) -> None:
    for _ in range(2 * RULES.slow_samples):
        for key, latency_s in latencies_s.items():
            board.succeeded(key, 0.0, latency_s)


@pytest.mark.parametrize(
    ("latencies_s", "out"),
    [
        ({D0: 0.05, D1: 0.01, D2: 0.01}, [D0]),
        ({D0: 0.039, D1: 0.01, D2: 0.01}, []),            # under four times as slow
        ({D0: 0.005, D1: 0.001, D2: 0.001}, []),          # 4 ms more are nothing
        ({D0: 0.9, D1: 0.9, D2: 0.9}, []),                # all alike
        ({D0: 0.9}, []),                                  # nobody to compare with
        ({D0: 0.5, D1: 0.5, D2: 0.01, D3: 0.01}, [D0, D1]),
    ],
)  # fmt: skip
def test_only_outliers_among_peers_are_ejected_for_slowness(
    latencies_s: dict[WorkerKey, float], out: list[WorkerKey]
) -> None:
    board = board_of(4)
    measure(board, latencies_s)
    assert [key for key in KEYS if board.state(key) is HealthState.EJECTED] == out
    assert board.ejected[Role.DECODE, EjectReason.SLOW] == len(out)


def test_a_wrong_transition_is_refused() -> None:
    with pytest.raises(InternalError, match="healthy cannot become probation"):
        WorkerHealth(Pool("tiny", Role.DECODE)).begin_probation(0.0)


def test_facts_about_unknown_workers_are_ignored() -> None:
    board = board_of(1)
    board.remove(D0)
    board.failed(D0, 0.0)
    board.succeeded(D0, 0.0, 1.0)
    board.canary_ended(D0, 0.0, passed=True)
    assert board.check(0.0, [silent(D0, 9.0)]) == []
    assert board.admits(D0, 0)


class TestProgress:
    def report(
        self, progress: Progress, now_s: float, steps: int | None, *, work: bool = True, tokens: int = 0
    ) -> None:
        progress.load_reported(now_s, steps=steps, has_work=work, waiting_tokens=tokens)

    def test_words_and_new_steps_are_progress_and_a_bare_report_is_not(self) -> None:
        progress = Progress()
        self.report(progress, 10.0, 5)
        progress.work_started(10.0)
        self.report(progress, 12.0, 5)
        assert progress.silent_s(12.0) == 2.0
        self.report(progress, 13.0, 6)
        assert progress.silent_s(13.0) == 0.0
        progress.request_event(14.0)
        assert progress.silent_s(15.5) == 1.5

    def test_a_long_step_that_computes_is_progress_and_measured_whole(self) -> None:
        progress = Progress()
        self.report(progress, 0.0, 5, tokens=1000)
        for second in range(1, 30):
            progress.computing(float(second))
            assert progress.silent_s(second + 0.5) == 0.5
        self.report(progress, 30.0, 6, tokens=0)
        assert progress.limit_s(5.0, 1000) > 30.0
        progress.excuse(7.0)
        assert progress.silent_s(38.0) == 1.0

    def test_a_report_without_work_for_the_engine_is_progress(self) -> None:
        """A decode worker that holds blocks for a prompt on its way makes no steps."""
        progress = Progress()
        self.report(progress, 1.0, 5, work=False)
        self.report(progress, 2.0, 5, work=False)
        assert progress.silent_s(3.0) == 1.0

    def test_a_worker_that_does_not_count_steps_is_not_judged(self) -> None:
        progress = Progress()
        self.report(progress, 1.0, None)
        assert progress.silent_s(1000.0) is None

    def test_the_wait_begins_with_the_work(self) -> None:
        progress = Progress()
        self.report(progress, 1.0, 5, work=False)
        progress.work_started(500.0)
        assert progress.silent_s(501.0) == 1.0

    def test_a_pause_of_the_router_itself_is_excused(self) -> None:
        progress = Progress()
        self.report(progress, 0.0, 1)
        progress.excuse(30.0)
        assert progress.silent_s(31.0) == 1.0

    def test_a_prompt_to_compute_gives_more_time_but_a_stuck_worker_is_out_within_ten_seconds(self) -> None:
        progress = Progress()
        assert progress.limit_s(5.0, 0) == 5.0
        assert progress.limit_s(5.0, 500) == pytest.approx(5.0 + 500 * SAFETY * FIRST_GUESS_S_PER_TOKEN)
        assert progress.limit_s(5.0, 100_000) == pytest.approx(5.0 + STEP_TOKENS * SAFETY * FIRST_GUESS_S_PER_TOKEN)
        assert progress.limit_s(5.0, 100_000) < 7.5

    def test_a_worker_that_takes_long_for_a_chunk_gets_the_time_for_the_next(self) -> None:
        progress = Progress()
        self.report(progress, 0.0, 1, tokens=4096)
        self.report(progress, 51.2, 2, tokens=3584)
        assert progress.limit_s(5.0, 0) > 51.2
        for step in range(20):
            self.report(progress, 51.2 + 0.1 * step, 3 + step, tokens=3584 - 100 * step)
        assert progress.limit_s(5.0, 0) < 10.0, "and no more when it is quick again"


def test_workers_on_probation_count_among_those_that_are_out() -> None:
    board = board_of(4)
    for key in (D0, D1):
        fail(board, key, 50)
    board.check(RULES.first_ejection_s, [])
    assert board.state(D0) is HealthState.PROBATION
    for key in (D2, D3):
        fail(board, key, 50, RULES.first_ejection_s + 0.5)
    assert [board.admits(key, 0) for key in KEYS[:4]] == [False, False, True, True]


def test_if_stalls_leave_fewer_than_half_those_that_only_failed_take_requests_again() -> None:
    board = board_of(4)
    for key in (D0, D1):
        fail(board, key, 50)
    assert not board.admits(D0, 0)
    board.check(1.0, [silent(D2, 6.0)])
    assert [board.admits(key, 100) for key in KEYS[:4]] == [True, True, False, True]


def test_a_step_of_a_lone_worker_stands_for_the_canary_that_waits_behind_its_requests() -> None:
    board = board_of(1)
    board.check(0.0, [silent(D0, 6.0)])
    stuck, went_on = Silence(D0, 7.0, LIMIT_S, -6.0), Silence(D0, 0.1, LIMIT_S, 1.4)
    assert canaries(board.check(1.0, [stuck])) == [D0]
    assert not board.admits(D0, 0)
    board.check(1.5, [went_on])
    assert board.admits(D0, 500)
    board.canary_ended(D0, 6.0, passed=False)  # it timed out behind the requests
    assert board.admits(D0, 500)


def test_a_step_before_the_ejection_proves_nothing() -> None:
    board = board_of(1)
    board.check(10.0, [silent(D0, 6.0)])
    board.check(11.0, [Silence(D0, 0.5, LIMIT_S, 4.0)])
    assert not board.admits(D0, 0)


class VirtualLoop:
    """Time passes only from one timer to the next."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self.time_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> SimpleNamespace:
        self._timers.append((self.time_s + delay_s, call))
        return SimpleNamespace(cancel=lambda: None)

    def step(self) -> None:
        self._timers.sort(key=lambda timer: timer[0])
        self.time_s, call = self._timers.pop(0)
        call()


@pytest.mark.parametrize("last_sign_s", [0.0, 0.07, 0.125, 0.2499, 1 / 3, 0.2 + 0.1])
@pytest.mark.parametrize("reports_for_s", [0.0, 1.7])
def test_a_frozen_worker_is_out_and_empty_exactly_when_its_silence_is_as_long_as_allowed(
    monkeypatch: pytest.MonkeyPatch, last_sign_s: float, reports_for_s: float
) -> None:
    """Whenever it froze between two looks, and whatever it reported before."""
    loop, board, stall_s = VirtualLoop(), board_of(2), 5.0
    monkeypatch.setattr("router.probes.health_watch.asyncio.get_running_loop", lambda: loop)
    emptied: list[float] = []
    progress = Progress()
    link = SimpleNamespace(
        ready=True, idle=False, progress=progress, fail_requests=lambda reason: emptied.append(loop.time_s)
    )
    worker = SimpleNamespace(key=D0, link=link, account=SimpleNamespace(prefill_tokens=0))
    fleet = SimpleNamespace(workers=lambda: [worker], worker=lambda *key: worker, health=board)
    metrics = SimpleNamespace()
    watch = HealthWatch(fleet, metrics, loop, stall_s, on_change=lambda: None)  # type: ignore[arg-type]
    progress.work_started(loop.time_s)
    watch.wake()
    froze_s = loop.time_s + reports_for_s + last_sign_s
    while loop.time_s < froze_s:
        loop.step()
        progress.load_reported(
            min(loop.time_s, froze_s), steps=round(loop.time_s * 100), has_work=True, waiting_tokens=0
        )
    progress.load_reported(froze_s, steps=-1, has_work=True, waiting_tokens=0)
    while board.state(D0) is not HealthState.EJECTED:
        loop.step()
        assert loop.time_s <= froze_s + stall_s + TIME_GRAIN_S
    assert loop.time_s == pytest.approx(froze_s + stall_s, abs=TIME_GRAIN_S)
    assert emptied == [loop.time_s]
