from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_turns import MAX_REMEMBERED, FairShares, FairTurns

WEIGHTS = {"low": 1.0, "mid": 2.0, "high": 5.0}
LONGEST = 200


@dataclass(eq=False, slots=True)
class Entry:
    priority: str
    tenant: str
    tokens: int


PLACES = st.tuples(st.sampled_from(sorted(WEIGHTS)), st.sampled_from("xyz"))
ENTRIES = st.builds(Entry, st.sampled_from(sorted(WEIGHTS)), st.sampled_from("xyz"), st.integers(1, LONGEST))
STEPS = st.lists(st.one_of(ENTRIES, st.just("take"), st.just("remove")), max_size=120)


def drain(queue: FairTurns[Entry]) -> list[Entry]:
    taken = []
    while (entry := queue.head()) is not None:
        queue.take(entry)
        taken.append(entry)
    return taken


def started(steps: list[Entry | str]) -> tuple[FairTurns[Entry], list[Entry]]:
    """A queue after `steps`, and the entries that wait in it."""
    queue: FairTurns[Entry] = FairTurns(WEIGHTS)
    waiting: list[Entry] = []
    for step in steps:
        if isinstance(step, Entry):
            queue.add(step)
            waiting.append(step)
        elif waiting:
            entry = queue.head() if step == "take" else waiting[0]
            assert entry is not None
            queue.take(entry) if step == "take" else queue.remove(entry)
            waiting.remove(entry)
    return queue, waiting


@given(STEPS)
def test_each_request_has_one_turn_in_the_order_of_its_tenants_line(steps: list[Entry | str]) -> None:
    queue, waiting = started(steps)
    assert len(queue) == len(waiting)
    assert Counter(map(id, queue)) == Counter(map(id, waiting))
    lines: dict[tuple[str, str], deque[Entry]] = defaultdict(deque)
    for entry in waiting:
        lines[entry.priority, entry.tenant].append(entry)
    for entry in drain(queue):
        assert lines[entry.priority, entry.tenant].popleft() is entry
    assert not any(lines.values())
    assert len(queue) == 0


@given(STEPS, st.integers(1, 60))
def test_who_all_wait_are_served_by_weight_within_a_request_of_each(steps: list[Entry | str], turns: int) -> None:
    queue, _ = started(steps)
    for priority in WEIGHTS:
        for tenant in "xyz":
            for _ in range(turns + 1):
                queue.add(Entry(priority, tenant, LONGEST))
    served: Counter[str] = Counter()
    tenants: Counter[tuple[str, str]] = Counter()
    for _ in range(turns):
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
        served[entry.priority] += entry.tokens
        tenants[entry.priority, entry.tenant] += entry.tokens
    for one, other in (("low", "mid"), ("low", "high"), ("mid", "high")):
        apart = abs(served[one] / WEIGHTS[one] - served[other] / WEIGHTS[other])
        assert apart <= LONGEST / WEIGHTS[one] + LONGEST / WEIGHTS[other] + 1e-6
    for priority in WEIGHTS:
        counts = [tenants[priority, tenant] for tenant in "xyz"]
        assert max(counts) - min(counts) <= 2 * LONGEST


@given(STEPS, ENTRIES)
def test_a_newcomer_waits_for_about_the_tokens_that_are_said_to_be_ahead(
    steps: list[Entry | str], newcomer: Entry
) -> None:
    queue, _ = started(steps)
    ahead = queue.tokens_ahead(newcomer.priority, newcomer.tenant)
    queue.add(newcomer)
    before = 0
    for entry in drain(queue):
        if entry is newcomer:
            break
        before += entry.tokens
    assert abs(before - ahead) <= len(WEIGHTS) * 3 * LONGEST


@given(STEPS)
def test_nobody_starves_behind_newcomers_of_others(steps: list[Entry | str]) -> None:
    queue, _ = started(steps)
    waiter = Entry("low", "patient", LONGEST)
    queue.add(waiter)
    for turn in range(1_000):
        queue.add(Entry("high", f"t{turn % 7}", LONGEST))
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
        if entry is waiter:
            return
    raise AssertionError("it never had its turn")


def test_tokens_ahead_are_a_tenants_own_and_the_share_of_the_others() -> None:
    queue: FairTurns[Entry] = FairTurns(WEIGHTS)
    for _ in range(10):
        queue.add(Entry("low", "x", 10))
        queue.add(Entry("high", "z", 10))
    assert queue.tokens_ahead("low", "x") == 100 + 100, "both have turns until then, and high has no more than that"
    assert queue.tokens_ahead("high", "z") == 100 + 100 / 5, "one token of low for five"
    assert queue.tokens_ahead("low", "y") == 0
    assert queue.tokens_ahead("mid", "x") == 0


def test_short_prompts_have_more_turns_than_long_ones() -> None:
    queue: FairTurns[Entry] = FairTurns({"one": 1.0})
    for _ in range(20):
        queue.add(Entry("one", "long", 100))
        queue.add(Entry("one", "short", 10))
    first = Counter(entry.tenant for entry in drain(queue)[:11])
    assert first == {"long": 1, "short": 10}


def test_a_tenant_that_comes_late_has_no_turns_saved_up() -> None:
    queue: FairTurns[Entry] = FairTurns({"one": 1.0})
    for _ in range(30):
        queue.add(Entry("one", "early", 10))
    for _ in range(10):
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
    for _ in range(10):
        queue.add(Entry("one", "late", 10))
    assert Counter(entry.tenant for entry in drain(queue)[:10]) == {"early": 5, "late": 5}


def test_a_tenant_that_leaves_the_line_empty_between_its_requests_gains_nothing() -> None:
    queue: FairTurns[Entry] = FairTurns({"one": 1.0})
    for _ in range(100):
        queue.add(Entry("one", "steady", 10))
    served: Counter[str] = Counter()
    for _ in range(60):
        if not any(entry.tenant == "single" for entry in queue):
            queue.add(Entry("one", "single", 100))
        entry = queue.head()
        assert entry is not None
        queue.take(entry)
        served[entry.tenant] += entry.tokens
    assert served["single"] - served["steady"] <= 200


def test_put_first_comes_before_all_and_costs_no_turn() -> None:
    queue: FairTurns[Entry] = FairTurns({"one": 1.0})
    a, b, back = Entry("one", "x", 10), Entry("one", "y", 10), Entry("one", "x", 1000)
    queue.add(a)
    queue.add(b)
    queue.put_first(back)
    assert queue.tokens_ahead("one", "z") >= 1000
    assert drain(queue) == [back, a, b]


def test_tenants_that_are_gone_are_forgotten() -> None:
    shares: FairShares[str] = FairShares()
    shares.activate("always")
    for number in range(3 * MAX_REMEMBERED):
        shares.activate(f"t{number}")
        shares.serve(f"t{number}", 1.0 + number)
        shares.deactivate(f"t{number}")
    assert len(shares._idle) <= MAX_REMEMBERED
