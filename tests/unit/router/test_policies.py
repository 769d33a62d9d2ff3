from dataclasses import replace

import pytest

from router.policies.policy import PlacementPolicy, default_policy
from router.policies.types import Ask, Candidate, Placement, PlacementReason, WaitReason
from tandem.config import Disaggregation, RouterSpec


def worker(name: str, *, cached: int = 0, outstanding: int = 0, running: int = 0, free: int = 100) -> Candidate:
    return Candidate(name, 1, cached, outstanding, outstanding, running, free, 100)


def policy(mode: Disaggregation = Disaggregation.ALWAYS) -> PlacementPolicy:
    spec = RouterSpec(disaggregation=mode, local_prefill_max_tokens=32, max_prefill_tokens_in_flight=1000)
    return default_policy(spec)


def place(
    ask: Ask, decode: list[Candidate], prefill: list[Candidate], mode: Disaggregation = Disaggregation.ALWAYS
) -> Placement:
    placed = policy(mode).place(ask, decode, prefill)
    assert isinstance(placed, Placement), placed
    return placed


@pytest.mark.parametrize(
    ("decode", "chosen"),
    [
        ([worker("a"), worker("b", running=3)], "a"),
        ([worker("a", free=10), worker("b", free=90)], "b"),
        ([worker("a"), worker("b", cached=96)], "b"),
        ([worker("a", running=0), worker("b", cached=96, running=20, free=50)], "b"),
        ([worker("b"), worker("a")], "a"),
    ],
    ids=["fewest running", "most free blocks", "cached prefix", "a cached prompt outweighs load", "ties by name"],
)
def test_decode_worker(decode: list[Candidate], chosen: str) -> None:
    assert place(Ask(100), decode, [worker("p")]).decode.worker_id == chosen


@pytest.mark.parametrize(
    ("prefill", "chosen"),
    [
        ([worker("p", outstanding=500), worker("q", outstanding=100)], "q"),
        ([worker("p", outstanding=100, cached=96), worker("q", outstanding=50)], "p"),
        ([worker("p", outstanding=500, cached=96), worker("q", outstanding=100)], "q"),
    ],
    ids=["least outstanding", "a cached prefix is work saved", "but not at any price"],
)
def test_prefill_worker(prefill: list[Candidate], chosen: str) -> None:
    placed = place(Ask(100), [worker("d")], prefill)
    assert placed.prefill is not None
    assert placed.prefill.worker_id == chosen


@pytest.mark.parametrize(
    ("mode", "tokens", "cached", "prefill", "reason"),
    [
        (Disaggregation.ALWAYS, 5, 0, 1, PlacementReason.HANDOFF_LEAST_LOADED),
        (Disaggregation.ALWAYS, 64, 64, 1, PlacementReason.HANDOFF_CACHED_PREFIX),
        (Disaggregation.ALWAYS, 64, 0, 0, PlacementReason.LOCAL_NO_PREFILL_WORKER),
        (Disaggregation.AUTO, 32, 0, 1, PlacementReason.LOCAL_SHORT_SUFFIX),
        (Disaggregation.AUTO, 33, 0, 1, PlacementReason.HANDOFF_LEAST_LOADED),
        (Disaggregation.AUTO, 500, 480, 1, PlacementReason.LOCAL_SHORT_SUFFIX),
        (Disaggregation.AUTO, 500, 0, 0, PlacementReason.LOCAL_NO_PREFILL_WORKER),
        (Disaggregation.NEVER, 500, 0, 1, PlacementReason.LOCAL_CONFIGURED),
    ],
)
def test_local_or_handoff(
    mode: Disaggregation, tokens: int, cached: int, prefill: int, reason: PlacementReason
) -> None:
    placed = place(Ask(tokens), [worker("d", cached=cached)], [worker("p")] * prefill, mode)
    assert placed.reason is reason
    assert (placed.prefill is None) == reason.value.startswith("local")


@pytest.mark.parametrize(
    ("ask", "decode", "prefill", "reason"),
    [
        (Ask(10), [], [worker("p")], WaitReason.NO_DECODE_WORKER),
        (Ask(10, frozenset({"d"})), [worker("d")], [worker("p")], WaitReason.DECODE_REFUSED),
        (Ask(600), [worker("d")], [worker("p", outstanding=500)], WaitReason.PREFILL_FULL),
        (Ask(600), [worker("d", outstanding=500)], [], WaitReason.PREFILL_FULL),
    ],
)
def test_request_waits(ask: Ask, decode: list[Candidate], prefill: list[Candidate], reason: WaitReason) -> None:
    assert policy().place(ask, decode, prefill) is reason


def test_prefill_worker_that_failed_it_gives_way_to_another_and_the_last_to_local_prefill() -> None:
    ask, decode = Ask(100, frozenset({"p"})), [worker("d")]
    placed = place(ask, decode, [worker("p"), worker("q", outstanding=500)])
    assert placed.prefill is not None
    assert placed.prefill.worker_id == "q"
    assert place(ask, decode, [worker("p")]).reason is PlacementReason.LOCAL_PREFILL_FAILED


def test_idle_prefill_worker_takes_a_prompt_beyond_its_budget() -> None:
    placed = place(Ask(5000), [worker("d")], [worker("p", outstanding=10), worker("q")])
    assert placed.prefill is not None
    assert placed.prefill.worker_id == "q"


def test_prompt_cached_whole_still_computes_its_last_token() -> None:
    assert worker("d", cached=64).uncached_tokens(Ask(64)) == 1


def test_a_prefill_worker_without_a_link_to_the_decode_worker_is_not_chosen() -> None:
    decode = worker("decode-0")
    unlinked = replace(worker("prefill-0"), reaches=frozenset({("decode-0", 99)}))
    linked = replace(worker("prefill-1", outstanding=500), reaches=frozenset({("decode-0", decode.epoch)}))
    assert place(Ask(100), [decode], [unlinked, linked]).prefill == linked
    placed = place(Ask(100), [decode], [unlinked])
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
    busy = replace(worker("p"), dispatched_tokens=own, outstanding_tokens=all_routers)
    assert isinstance(policy().place(Ask(tokens), [worker("d")], [busy]), Placement) is room
