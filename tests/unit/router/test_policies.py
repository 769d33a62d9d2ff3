from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs

from router.policies.pace import START_PACE, Pace
from router.policies.placement import PlacementPolicy, named_policy
from router.policies.types import Candidate, Placement, PlacementQuery, PlacementReason, WaitReason
from tandem.config.router import Disaggregation, PolicyName, RouterSpec

ALWAYS, AUTO, NEVER = Disaggregation.ALWAYS, Disaggregation.AUTO, Disaggregation.NEVER
SLOW = replace(START_PACE, prefill_s_per_token=4 * START_PACE.prefill_s_per_token)


def worker(
    name: str, *, cached: int = 0, outstanding: int = 0, running: int = 0, free: int = 100, pace: Pace = START_PACE
) -> Candidate:
    return Candidate(name, 1, cached, outstanding, outstanding, running, free, 100, pace=pace)


def policy(mode: Disaggregation = ALWAYS, name: PolicyName = PolicyName.EXPECTED_TTFT) -> PlacementPolicy:
    return named_policy(
        RouterSpec(
            policy=name,
            disaggregation=mode,
            local_prefill_max_tokens=32,
            local_prefill_busy_max_tokens=200,
            max_prefill_tokens_in_flight=1000,
        )
    )


def place(
    query: PlacementQuery,
    decode: list[Candidate],
    prefill: list[Candidate],
    mode: Disaggregation = ALWAYS,
    name: PolicyName = PolicyName.EXPECTED_TTFT,
) -> Placement:
    placed = policy(mode, name).place(query, decode, prefill)
    assert isinstance(placed, Placement), placed
    return placed


@pytest.mark.parametrize(
    ("decode", "chosen"),
    [
        ([worker("a", running=4), worker("b", running=3)], "b"),
        ([worker("a", free=10), worker("b", free=90)], "b"),
        ([worker("a"), worker("b", cached=4096)], "b"),
        ([worker("a"), worker("b", cached=4096, running=1)], "a"),
        ([worker("a", running=1), worker("b", running=2, pace=replace(START_PACE, tpot_s=(0.01,) * 11))], "b"),
        ([worker("a", outstanding=8000), worker("b")], "b"),
        ([worker("b"), worker("a")], "a"),
    ],
    ids=[
        "the smaller batch",
        "more free blocks",
        "a cached prefix is not sent",
        "but is sent rather than join a larger batch",
        "the faster one",
        "not behind a long local prefill",
        "ties by name",
    ],
)
def test_decode_worker(decode: list[Candidate], chosen: str) -> None:
    assert place(PlacementQuery(4100, answer_tokens=200), decode, [worker("p")]).decode.worker_id == chosen


@pytest.mark.parametrize(
    ("prefill", "chosen"),
    [
        ([worker("p", outstanding=500), worker("q", outstanding=100)], "q"),
        ([worker("p", outstanding=100, cached=96), worker("q", outstanding=50)], "p"),
        ([worker("p", outstanding=500, cached=96), worker("q", outstanding=100)], "q"),
        ([worker("p", pace=SLOW), worker("q", outstanding=250)], "q"),
        ([worker("p", pace=SLOW), worker("q", outstanding=950)], "p"),
        ([worker("p"), structs.replace(worker("q"), transfer_to={("d", 1): 1e-6})], "q"),
        ([worker("p"), structs.replace(worker("q"), transfer_to={("d", 2): 1e-6})], "p"),
    ],
    ids=[
        "least outstanding",
        "a cached prefix is work saved",
        "but not at any price",
        "a slow one counts its tokens fourfold",
        "so it comes second to a longer queue",
        "a fast link",
        "but not one to another life",
    ],
)
def test_prefill_worker(prefill: list[Candidate], chosen: str) -> None:
    placed = place(PlacementQuery(100), [worker("d")], prefill)
    assert placed.prefill is not None
    assert placed.prefill.worker_id == chosen


@pytest.mark.parametrize("noise", [(0.0, 0.0, 0.0, 0.0), (0.0, 0.01, 0.02, 0.03), (0.03, 0.0, 0.03, 0.03)])
def test_requests_are_spread_while_a_larger_batch_takes_hardly_longer(noise: tuple[float, ...]) -> None:
    """What is measured of equal workers differs by some per cent."""
    paces = [replace(START_PACE, tpot_s=(0.02 * (1 + each),) * 11) for each in noise]
    running = Counter({f"d{number}": 0 for number in range(4)})
    query = PlacementQuery(256, answer_tokens=64)
    for _ in range(200):
        decode = [worker(name, running=running[name], pace=pace) for name, pace in zip(running, paces, strict=True)]
        running[place(query, decode, [worker("p")]).decode.worker_id] += 1
    assert max(running.values()) <= 2 * min(running.values()), running


def bounded(name: str, **options: int) -> Candidate:
    return structs.replace(worker(name, **options), bounds_steps=True)  # type: ignore[arg-type]


BUSY = [worker("p", outstanding=900)]


@pytest.mark.parametrize(
    ("mode", "name", "tokens", "decode", "prefill", "reason"),
    [
        (ALWAYS, "expected_ttft", 5, worker("d"), [worker("p")], PlacementReason.HANDOFF_CONFIGURED),
        (ALWAYS, "expected_ttft", 64, worker("d"), [], PlacementReason.LOCAL_NO_PREFILL_WORKER),
        (NEVER, "expected_ttft", 500, worker("d"), [worker("p")], PlacementReason.LOCAL_CONFIGURED),
        (AUTO, "expected_ttft", 500, worker("d"), [], PlacementReason.LOCAL_NO_PREFILL_WORKER),
        (AUTO, "expected_ttft", 32, worker("d", running=9), [worker("p")], PlacementReason.LOCAL_SHORT_SUFFIX),
        (AUTO, "expected_ttft", 500, worker("d", cached=480), [worker("p")], PlacementReason.LOCAL_SHORT_SUFFIX),
        (AUTO, "expected_ttft", 33, worker("d"), [worker("p")], PlacementReason.HANDOFF_AS_SOON),
        (AUTO, "expected_ttft", 80, worker("d", running=9), BUSY, PlacementReason.LOCAL_SOONER),
        (AUTO, "expected_ttft", 80, worker("d", pace=SLOW, outstanding=150), BUSY, PlacementReason.HANDOFF_AS_SOON),
        (AUTO, "expected_ttft", 80, worker("d", running=1, outstanding=121), BUSY,
         PlacementReason.HANDOFF_SPARES_DECODES),
        (AUTO, "expected_ttft", 80, bounded("d", running=9, outstanding=121), BUSY, PlacementReason.LOCAL_SOONER),
        (AUTO, "expected_ttft", 700, bounded("d", running=9), BUSY, PlacementReason.LOCAL_SOONER),
        (AUTO, "expected_ttft", 1200, bounded("d", running=9),
         [structs.replace(worker("p", outstanding=2000), dispatched_tokens=0)], PlacementReason.LOCAL_SOONER),
        (AUTO, "expected_ttft", 1200, structs.replace(bounded("d", running=9, outstanding=1), dispatched_tokens=0),
         [structs.replace(worker("p", outstanding=2000), dispatched_tokens=0)], PlacementReason.HANDOFF_SPARES_DECODES),
        (AUTO, "expected_ttft", 90, worker("d", outstanding=120), BUSY, PlacementReason.LOCAL_SOONER),
        (AUTO, "expected_ttft", 700, worker("d"), BUSY, PlacementReason.LOCAL_SOONER),
        (AUTO, "expected_ttft", 210, worker("d", pace=SLOW), BUSY, PlacementReason.LOCAL_PREFILL_FULL),
        (AUTO, "cache_only", 33, worker("d"), BUSY, PlacementReason.HANDOFF_LONG_SUFFIX),
        (AUTO, "random", 32, worker("d"), BUSY, PlacementReason.LOCAL_SHORT_SUFFIX),
    ],
)  # fmt: skip
def test_local_or_handoff(
    mode: Disaggregation, name: str, tokens: int, decode: Candidate, prefill: list[Candidate], reason: PlacementReason
) -> None:
    placed = place(PlacementQuery(tokens), [decode], prefill, mode, PolicyName(name))
    assert placed.reason is reason
    assert (placed.prefill is None) == reason.value.startswith("local")


@pytest.mark.parametrize(
    ("mode", "query", "decode", "prefill", "reason"),
    [
        (AUTO, PlacementQuery(10), [], [worker("p")], WaitReason.NO_DECODE_WORKER),
        (AUTO, PlacementQuery(10, frozenset({"d"})), [worker("d")], [worker("p")], WaitReason.DECODE_REFUSED),
        (ALWAYS, PlacementQuery(600), [worker("d")], [worker("p", outstanding=500)], WaitReason.PREFILL_FULL),
        (ALWAYS, PlacementQuery(600), [worker("d", outstanding=500)], [], WaitReason.PREFILL_FULL),
        (AUTO, PlacementQuery(600), [worker("d", running=1)], [worker("p", outstanding=500)], WaitReason.PREFILL_FULL),
        (AUTO, PlacementQuery(600), [worker("d", pace=SLOW)], [worker("p", outstanding=500)], WaitReason.PREFILL_FULL),
    ],
)
def test_request_waits(
    mode: Disaggregation, query: PlacementQuery, decode: list[Candidate], prefill: list[Candidate], reason: WaitReason
) -> None:
    assert policy(mode).place(query, decode, prefill) is reason


def test_prefill_worker_that_failed_it_gives_way_to_another_and_the_last_to_local_prefill() -> None:
    query, decode = PlacementQuery(100, frozenset({"p"})), [worker("d")]
    placed = place(query, decode, [worker("p"), worker("q", outstanding=500)])
    assert placed.prefill is not None
    assert placed.prefill.worker_id == "q"
    assert place(query, decode, [worker("p")]).reason is PlacementReason.LOCAL_PREFILL_FAILED


def test_idle_prefill_worker_takes_a_prompt_beyond_its_budget() -> None:
    placed = place(PlacementQuery(5000), [worker("d")], [worker("p", outstanding=10), worker("q")])
    assert placed.prefill is not None
    assert placed.prefill.worker_id == "q"


def test_prompt_cached_whole_still_computes_its_last_token() -> None:
    assert worker("d", cached=64).uncached_tokens(PlacementQuery(64)) == 1


@pytest.mark.parametrize("mode", [ALWAYS, AUTO])
def test_an_answer_of_one_token_comes_from_the_prefill_worker_that_has_most_of_it(mode: Disaggregation) -> None:
    query = PlacementQuery(500, is_prompt_alone=True)
    placed = place(query, [worker("d")], [worker("p"), worker("q", cached=480)], mode)
    assert (placed.decode.worker_id, placed.prefill) == ("q", None)
    assert placed.reason is PlacementReason.PROMPT_ALONE
    assert place(query, [worker("d")], [], mode).decode.worker_id == "d"
    full = worker("p", outstanding=900)
    assert place(query, [worker("d")], [full, worker("q")], mode).decode.worker_id == "q"
    failed = structs.replace(query, excluded=frozenset({"p"}))
    assert place(failed, [worker("d")], [worker("p")], mode).reason is PlacementReason.LOCAL_PREFILL_FAILED
    if mode is AUTO:
        near = worker("d", cached=480)
        assert place(query, [near], [worker("p")], mode).decode is near


def test_a_prefill_worker_without_a_link_to_the_decode_worker_is_not_chosen() -> None:
    decode = worker("decode-0")
    unlinked = structs.replace(worker("prefill-0"), reaches=frozenset({("decode-0", 99)}))
    linked = structs.replace(worker("prefill-1", outstanding=500), reaches=frozenset({("decode-0", decode.epoch)}))
    assert place(PlacementQuery(100), [decode], [unlinked, linked]).prefill == linked
    placed = place(PlacementQuery(100), [decode], [unlinked])
    assert placed.prefill is None
    assert placed.reason is PlacementReason.LOCAL_NO_PREFILL_WORKER


@pytest.mark.parametrize(
    ("own", "all_routers", "tokens", "room"),
    [
        (0, 0, 5000, True),
        (0, 900, 5000, True),
        (10, 900, 90, True),
        (10, 900, 101, False),
        (900, 200, 700, True),
        (900, 200, 900, False),
    ],
    ids=[
        "idle",
        "busy with others' only: never starved",
        "shares the budget",
        "the budget is for all routers",
        "what is computed already does not count",
        "a long prompt waits for ours",
    ],
)
def test_room_for_prompt_tokens_is_shared_by_all_routers(own: int, all_routers: int, tokens: int, room: bool) -> None:
    busy = structs.replace(worker("p"), dispatched_tokens=own, outstanding_tokens=all_routers)
    assert isinstance(policy().place(PlacementQuery(tokens), [worker("d")], [busy]), Placement) is room


def test_another_decode_worker_is_one_that_the_prefill_worker_reaches() -> None:
    prefill = structs.replace(worker("p"), reaches=frozenset({("b", 1), ("c", 1)}))
    decode = [worker("a"), worker("b", running=5), worker("c", running=1), worker("d")]
    query = PlacementQuery(100, frozenset({"d"}), answer_tokens=50)
    assert policy().another_decode(query, decode, prefill) == decode[2]
    assert policy().another_decode(query, decode[:1], prefill) is None


EIGHT = [worker(f"d{number}") for number in range(8)]


class TestSession:
    def home(self, session: int, workers: list[Candidate]) -> str:
        query = PlacementQuery(100, answer_tokens=100, session=session.to_bytes(8))
        return place(query, workers, [worker("p")]).decode.worker_id

    def test_requests_of_a_session_meet_again_and_sessions_spread(self) -> None:
        homes = Counter(self.home(session, EIGHT) for session in range(200))
        assert homes == Counter(self.home(session, EIGHT[::-1]) for session in range(200))
        assert len(homes) == 8
        assert max(homes.values()) < 50

    def test_only_sessions_of_a_lost_worker_move(self) -> None:
        for session in range(50):
            home = self.home(session, EIGHT)
            left = [each for each in EIGHT if each.worker_id != "d3"]
            assert (self.home(session, left) == home) == (home != "d3")

    def test_is_given_up_for_a_worker_that_is_much_sooner(self) -> None:
        home = self.home(1, EIGHT)
        loaded = [structs.replace(each, running_requests=20) if each.worker_id == home else each for each in EIGHT]
        assert self.home(1, loaded) != home


THREE_PREFILL = [worker("p0", outstanding=300), worker("p1", cached=64, outstanding=1), worker("p2")]
THREE_DECODE = [worker("d0", running=3), worker("d1", running=2, cached=64), worker("d2", running=1)]


class TestBaselines:
    def chosen(self, name: str, number: int = 0) -> tuple[str, str]:
        placed = place(PlacementQuery(100, number=number), THREE_DECODE, THREE_PREFILL, ALWAYS, PolicyName(name))
        return placed.decode.worker_id, placed.prefiller.worker_id

    def test_least_loaded_is_blind_to_the_cache(self) -> None:
        assert self.chosen("least_loaded") == ("d2", "p2")

    def test_cache_only_is_blind_to_load(self) -> None:
        assert self.chosen("cache_only") == ("d1", "p1")

    def test_round_robin_takes_turns(self) -> None:
        assert [self.chosen("round_robin", number)[0] for number in range(4)] == ["d0", "d1", "d2", "d0"]

    def test_random_is_even_and_repeatable(self) -> None:
        counts = Counter(self.chosen("random", number)[0] for number in range(600))
        assert counts == Counter(self.chosen("random", number)[0] for number in range(600))
        assert all(150 < count < 250 for count in counts.values())

    def test_random_draws_otherwise_with_another_seed(self) -> None:
        spec = RouterSpec(policy=PolicyName.RANDOM, disaggregation=ALWAYS)
        queries = [PlacementQuery(9, number=number) for number in range(20)]
        one, other = (
            [named_policy(spec, seed=seed).place(query, THREE_DECODE, THREE_PREFILL) for query in queries]
            for seed in (1, 2)
        )
        assert one != other
