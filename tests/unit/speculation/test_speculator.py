"""What is found, how likely it is right, what a token costs, and how many are therefore proposed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.speculation.acceptance import Acceptance, Rate
from tandem.speculation.drafting import DraftModel
from tandem.speculation.lookahead import Guesses
from tandem.speculation.lookup import GRAM, Found, TokenIndex
from tandem.speculation.proposers import Branch, Candidate, Draft, Proposal, Prospect, Speculation, Verified
from tandem.speculation.speculator import Speculator, Step
from tandem.speculation.step_costs import StepCosts
from tandem.speculation.text_proposers import Lookup


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_what_is_found_followed_the_same_tokens_before(tokens: list[int], most: int) -> None:
    index = TokenIndex()
    for length in range(len(tokens) + 1):  # as an answer grows
        index.extend(tokens[:length], 100)
    found = index.find(tokens, most)
    ends = [place for place in range(GRAM, len(tokens)) if tokens[place - GRAM : place] == tokens[-GRAM:]]
    assert (found is not None) == bool(ends)
    if found is not None:
        match = found.match
        assert match >= GRAM
        assert any(
            tokens[place - match : place] == tokens[len(tokens) - match :]
            and tuple(tokens[place : place + most]) == found.tokens
            and 0 < len(found.tokens) <= most
            for place in ends
        )


def test_the_longest_match_counts_not_the_latest() -> None:
    tokens = [9, 8, 1, 2, 3, 50, 7, 1, 2, 3, 60, 8, 1, 2, 3]
    assert found_in(tokens, 2) == Found((50, 7), 4)


def found_in(tokens: list[int], most: int) -> Found | None:
    index = TokenIndex()
    index.extend(tokens, len(tokens))
    return index.find(tokens, most)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_loop_goes_on_as_far_as_asked(period: int) -> None:
    tokens = [*range(period)] * (60 // period)
    found = found_in(tokens, 8)
    assert found is not None
    assert found.tokens == tuple(([*range(period)] * 8)[:8])


def test_long_prompts_are_indexed_over_several_steps_which_all_requests_share() -> None:
    draw = random.Random(1)
    by, step = speculator(0.010, 0.0001, 0.95), Step(3, 3, 100)
    prompts = [[draw.randrange(1000) for _ in range(3000)] for _ in range(3)]
    candidates = [Candidate(Speculation(), [*prompt, *prompt[2000:2010]], 4) for prompt in prompts]
    lags = []
    for _ in range(6):
        proposals = by.propose(candidates, step)
        lags.append(sum(each.state.index.lag(each.tokens) for each in candidates))
    assert all(one - other <= 2048 for one, other in pairwise(lags))
    assert lags[0] > lags[-1] == 0
    assert proposals == [Proposal(tuple(prompt[2010:2014])) for prompt in prompts]


def test_a_request_whose_look_up_fails_goes_on_without() -> None:
    by, step = speculator(0.010, 0.0001, 0.95), Step(2, 2, 100)
    broken, well = Candidate(Speculation(), [*repeating(), -1, None, 2, 3], 8), Candidate(Speculation(), repeating(), 8)  # type: ignore[list-item]
    assert [bool(each.tokens) for each in by.propose([broken, well], step)] == [False, True]
    assert (broken.state.has_failed, well.state.has_failed) == (True, False)


def test_costs_are_those_of_a_line() -> None:
    costs, draw = StepCosts(), random.Random(2)
    for _ in range(300):
        tokens = draw.randint(1, 9)
        costs.learn(tokens, (0.010 + 0.002 * tokens) * draw.uniform(0.95, 1.05))
    fixed_s, token_s = costs.line()
    assert fixed_s == pytest.approx(0.010, rel=0.1)
    assert token_s == pytest.approx(0.002, rel=0.1)


def test_one_step_that_was_interrupted_does_not_count_in_full() -> None:
    costs = StepCosts()
    for tokens in (1, 2, 3, 4, 5) * 20:
        costs.learn(tokens, 0.010 + 0.001 * tokens)
    costs.learn(1, 3.0)
    fixed_s, token_s = costs.line()
    assert 0.008 < fixed_s + token_s < 0.016


def test_the_first_steps_and_empty_ones_do_not_count() -> None:
    costs = StepCosts()
    for tokens, seconds in ((0, 0.1), (1, 2.0), (8, 0.5), (2, 0.3), (0, 0.0)):
        costs.learn(tokens, seconds)
        assert costs.line() == (1.0, 1 / 16)
    for tokens in (1, 2, 3) * 5:
        costs.learn(tokens, 0.010 + 0.001 * tokens)
    assert costs.line() == pytest.approx((0.010, 0.001), rel=0.05)


def test_what_a_token_costs_is_remembered_while_steps_are_alike() -> None:
    costs = StepCosts()
    for tokens in (1, 2, 3, 4) * 20:
        costs.learn(tokens, 0.001 + 0.009 * tokens)
    for _ in range(500):
        costs.learn(1, 0.010)
    assert costs.line() == pytest.approx((0.001, 0.009), rel=0.2)


def test_a_rate_is_first_that_of_all_and_then_its_own() -> None:
    acceptance, own = Acceptance(), Rate()
    for _ in range(50):
        acceptance.learn(Rate(), 4, compared=1, accepted=0)
    assert acceptance.of(own, 4) < 0.1
    for _ in range(20):
        acceptance.learn(own, 4, compared=3, accepted=3)
    assert acceptance.of(own, 4) > 0.75
    assert acceptance.of(Rate(), 20) == pytest.approx(0.6)


def speculator(fixed_s: float, token_s: float, chance: float, *, rests: bool = False) -> Speculator:
    found = Speculator(8, Lookup(), rests=rests)
    for tokens in (1, 1, 1, *(1, 2, 4, 8) * 20):
        found.costs.learn(tokens, fixed_s + token_s * tokens)
    accepted = round(chance * 100)
    for number in range(400):
        found._acceptance.learn(Rate(), (6 - 1).bit_length(), 1, int(number % 100 < accepted))
    return found


def repeating() -> list[int]:
    return [1, 2, 3, 4, 5, 6, *range(10, 20), 77, 1, 2, 3, 4, 5, 6]


def proposed(by: Speculator, requests: int) -> int:
    tokens = repeating()
    candidates = [Candidate(Speculation(), tokens, 8) for _ in range(requests)]
    return sum(len(each.tokens) for each in by.propose(candidates, Step(requests, requests, 10_000)))


@pytest.mark.parametrize(("chance", "at_least", "at_most"), [(0.95, 8, 8), (0.5, 2, 5), (0.02, 0, 0)])
def test_likely_tokens_are_proposed_further_ahead(chance: float, at_least: int, at_most: int) -> None:
    assert at_least <= proposed(speculator(0.010, 0.0005, chance), 1) <= at_most


def test_the_busier_a_step_the_less_is_proposed_for_each() -> None:
    """As tokens cost a tenth of the step, a full batch has nothing to gain."""
    each = [proposed(speculator(0.010, 0.001, 0.6), requests) / requests for requests in (1, 4, 16, 64)]
    assert all(one >= other for one, other in pairwise(each))
    assert each[0] >= 2
    assert each[-1] == 0


def test_where_nothing_pays_one_token_is_tried_now_and_then() -> None:
    by = speculator(0.010, 0.001, 0.02)
    counts = [proposed(by, 1) for _ in range(200)]
    assert 1 <= sum(counts) <= 5


def test_nothing_is_proposed_beyond_what_a_request_may_take() -> None:
    by = speculator(0.010, 0.0001, 0.95)
    for most in (-1, 0, 1, 3):
        (found,) = by.propose([Candidate(Speculation(), repeating(), most)], Step(1, 1, 100))
        assert len(found.tokens) == max(0, most)


def test_others_in_the_step_count_though_nothing_is_proposed_for_them() -> None:
    by = speculator(0.010, 0.0005, 0.6)
    alone, beside = (
        sum(
            len(each.tokens)
            for each in by.propose([Candidate(Speculation(), repeating(), 8)], Step(tokens, tokens, 100))
        )
        for tokens in (1, 64)
    )
    assert alone > beside == 0


def test_what_room_there_is_goes_to_the_likeliest() -> None:
    by = speculator(0.010, 0.0001, 0.95)
    unlikely, likely = Speculation(), Speculation()
    for _ in range(9):
        unlikely.rate.learn(1, 0, 0.9)
    found = by.propose([Candidate(each, repeating(), 8) for each in (unlikely, likely)], Step(2, 2, 3))
    assert [len(each.tokens) for each in found] == [0, 3]


def test_it_rests_while_nothing_pays_and_looks_again_now_and_then() -> None:
    by = speculator(0.010, 0.001, 0.02, rests=True)
    looked = []
    for step in range(100):
        resting = by.is_resting
        assert by.rests() == resting
        if not resting:
            looked.append(step)
            by.propose([Candidate(Speculation(), [1, 2], 8)], Step(1, 1, 100))
    assert looked[:16] == [*range(16)]
    assert {later - one for one, later in pairwise(looked[15:])} == {16}
    for _ in range(500):
        by._acceptance.learn(Rate(), (6 - 1).bit_length(), 8, 8)
    while by.rests():
        pass
    assert by.propose([Candidate(Speculation(), repeating(), 8)], Step(1, 1, 100))[0].tokens
    assert not by.is_resting


def test_without_leave_it_never_rests() -> None:
    by = speculator(0.010, 0.001, 0.02)
    for _ in range(50):
        by.propose([Candidate(Speculation(), [1, 2], 8)], Step(1, 1, 100))
        assert not by.rests()


class Drafted:
    """A drafter of fixed chances."""

    def __init__(self, *, at_once: bool = False, ready: int = 8) -> None:
        self.name, self.at_once, self.ready = "drafted", at_once, ready

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        return [Prospect(min(most, each.most), kind=1) for each in candidates]

    def drafts(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Draft | None]:
        return [Draft(count) if count else None for count in counts]

    def learn(self, state: Speculation, verified: Verified) -> None: ...


def drafted(pass_s: float, chance: float, requests: int, *, at_once: bool = False, room: int = 10_000) -> list[int]:
    """How many tokens are drafted for each request where a step takes 10 ms and 0.2 ms for each token."""
    by = Speculator(8, Drafted(at_once=at_once))
    for tokens in (1, 1, 1, *(1, 2, 4, 8) * 20):
        by.costs.learn(tokens, 0.010 + 0.0002 * tokens)
        by.pass_costs.learn(tokens, pass_s + 0.00002 * tokens)
    for number in range(600):
        by._acceptance.learn(Rate(), 1, 1, int(number % 100 < chance * 100))
    candidates = [Candidate(Speculation(), [1], 8) for _ in range(requests)]
    found = by.propose(candidates, Step(requests, requests, room))
    return [0 if each.draft is None else each.draft.count for each in found]


def test_more_is_drafted_the_less_a_pass_costs() -> None:
    counts = [drafted(pass_s, 0.7, 1)[0] for pass_s in (0.0002, 0.001, 0.003, 0.009)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 5
    assert counts[-1] == 0


def test_what_is_drafted_at_once_costs_one_pass() -> None:
    assert drafted(0.003, 0.8, 1, at_once=True)[0] > drafted(0.003, 0.8, 1)[0] > 0


def test_drafts_stay_within_the_room() -> None:
    assert sum(drafted(0.0001, 0.95, 4, room=6)) <= 6


def branching(token_s: float, rights: Sequence[float], **options: bool) -> Speculator:
    """The likeliest tokens are right half of the time; where they are wrong, the next ones as often as `rights`."""
    by = Speculator(4, Drafted(at_once=True), branches=3, **options)
    for tokens in (1, 1, 1, *(1, 2, 4, 8) * 20):
        by.costs.learn(tokens, 0.010 + token_s * tokens)
        by.pass_costs.learn(tokens, 0.0001)
    draw = random.Random(3)
    for _ in range(600):
        wrong, rank = draw.random() < 0.5, draw.choices(range(len(rights) + 1), [1 - sum(rights), *rights])[0]
        by.learn(Speculation(kind=1), Verified(9, 1, 1, int(not wrong), rank=rank))
    return by


def drafts(by: Speculator, requests: int = 1, room: int = 10_000) -> list[Draft]:
    candidates = [Candidate(Speculation(kind=1), [1], 8) for _ in range(requests)]
    found = by.propose(candidates, Step(requests, requests, room))
    return [each.draft or Draft(0) for each in found]


def branches(token_s: float, rights: Sequence[float]) -> tuple[Branch, ...]:
    return drafts(branching(token_s, rights))[0].branches


def test_branches_are_computed_where_their_tokens_pay() -> None:
    many = branches(0.00002, [0.4, 0.2, 0.1])
    assert [(each.shared, each.rank) for each in many[:2]] == [(0, 1), (0, 2)]
    assert len(many) == 3
    assert len(branches(0.0008, [0.4, 0.2, 0.1])) < 2
    assert branches(0.00002, [0.0, 0.0, 0.0]) == ()
    assert not any(each.branches for each in drafts(branching(0.0004, [0.4, 0.2, 0.1]), requests=64))


def test_a_branch_goes_on_as_long_as_its_tokens_pay() -> None:
    cheap, dear = (branches(cost, [0.5, 0.0, 0.0]) for cost in (0.00001, 0.0005))
    assert cheap[0].count == 4
    assert all(each.count < 4 for each in dear)


def test_branches_stay_within_the_room() -> None:
    for room in range(4, 30):
        found = drafts(branching(0.00001, [0.4, 0.3, 0.2]), requests=3, room=room)
        assert sum(each.count + sum(1 + branch.count for branch in each.branches) for each in found) <= room


def test_a_grammar_has_no_branches_and_without_looking_at_costs_all_others_have() -> None:
    by = branching(0.001, [0.1, 0.1, 0.1], adaptive=False)
    candidates = [Candidate(Speculation(kind=1), [1], 8, may_branch=may) for may in (True, False)]
    found = [each.draft for each in by.propose(candidates, Step(2, 2, 100))]
    assert [each and len(each.branches) for each in found] == [3, 0]


def test_a_draft_model_computes_what_it_does_not_know_before_it_drafts() -> None:
    model = DraftModel(most_tokens=1000)
    state = Speculation()
    candidate = Candidate(state, [*range(600)], 8)
    draft = model.drafts([candidate], [4])[0]
    assert draft == Draft(0, 0, 256)
    for begin, end in ((0, 256), (256, 512)):
        draft = model.drafts([candidate], [4])[0]
        assert draft == Draft(0, begin, end)
        model.learn(state, Verified(600, 0, 0, 0, draft=draft))
    draft = model.drafts([candidate], [4])[0]
    assert draft == Draft(4, 512, 599)
    for accepted, known in ((0, 600), (2, 602), (3, 603), (4, 603)):
        model.learn(state, Verified(600, 4, 4, accepted, draft=draft))
        assert state.drafted == known
    state.moved()
    assert model.drafts([candidate], [4])[0] == Draft(0, 0, 256)


def test_a_draft_model_shares_its_tokens_among_requests_and_ends_at_its_context() -> None:
    model = DraftModel(most_tokens=300)
    candidates = [Candidate(Speculation(), [*range(200)], 8) for _ in range(3)]
    assert [each and (each.count, each.end) for each in model.drafts(candidates, [2, 2, 2])] == [
        (2, 199),
        (0, 57),
        None,
    ]
    long = [Candidate(Speculation(), [*range(length)], 100) for length in (296, 299, 300, 400)]
    assert [each and each.count for each in model.prospects(long, 8)] == [4, 1, None, None]


def test_guesses_are_what_the_model_chose_and_runs_come_again() -> None:
    guesses = Guesses()
    assert guesses.find([5, 6, 7], 2) == ((6, 7), False)
    guesses.learn((7, 20, 21, 22))
    assert guesses.find([5, 6, 7], 2) == ((20, 21), True)
    assert guesses.find([5, 6, 9], 8) == ((20, 21, 22), False)
    assert guesses.find([21], 8) == ((22,), True)
    guesses.learn((9,))
    assert guesses.find([5, 6, 9], 2) == ((6, 9), False)


def test_it_may_propose_as_many_as_it_can() -> None:
    by = Speculator(8, Lookup(), adaptive=False)
    candidates = [Candidate(Speculation(), repeating(), most) for most in (8, 0, 3, 8)]
    assert [len(each.tokens) for each in by.propose(candidates, Step(4, 4, 14))] == [8, 0, 3, 3]


def test_a_trial_of_a_draft_model_goes_on_until_it_has_drafted() -> None:
    """It has to compute three requests' long prompts first; where that is least, it does."""
    model = DraftModel(most_tokens=10_000)
    by = Speculator(8, model)
    for tokens in (1, 1, 1, *(1, 2, 4, 8) * 20):
        by.costs.learn(tokens, 0.010 + 0.0002 * tokens)
        by.pass_costs.learn(tokens, 0.020)
    candidates = [Candidate(Speculation(), [*range(600 + number)], 100) for number in range(3)]
    drafted = 0
    for _ in range(70):
        for each, proposal in zip(candidates, by.propose(candidates, Step(3, 3, 100)), strict=True):
            if proposal.draft is not None:
                drafted += proposal.draft.count
                by.learn(each.state, Verified(len(each.tokens), proposal.draft.count, 0, 0, draft=proposal.draft))
    assert drafted == 1
    assert candidates[0].state.drafted == 600


def test_a_short_answer_gets_no_draft_model_that_knows_nothing_of_its_prompt() -> None:
    model = DraftModel(most_tokens=10_000)
    for most, able in ((10, False), (1000, True)):
        found = model.prospects([Candidate(Speculation(), [*range(5000)], most)], 8)
        assert (found[0] is not None) == able


def test_it_rests_where_no_request_may_have_proposals() -> None:
    by = speculator(0.010, 0.001, 0.5, rests=True)
    for _ in range(16):
        assert not by.rests()
        by.found_nothing()
    assert by.is_resting
