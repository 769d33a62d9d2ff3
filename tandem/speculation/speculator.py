"""Proposes tokens for the requests of a step, as many as pay.

The model computes a request's last token and the proposed ones in one step, and chooses a token after each. A proposed
token is accepted exactly if it is the one that the model chose, so an answer is the same with and without proposals.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from tandem.speculation.acceptance import Acceptance, Rate
from tandem.speculation.proposers import (
    NOTHING,
    Branch,
    Candidate,
    Draft,
    Drafting,
    Proposal,
    Proposer,
    Prospect,
    Speculation,
    Verified,
)
from tandem.speculation.step_costs import StepCosts

_MARGIN = 1.15  # a token has to pay that much more than it costs: choosing and reporting it costs too
_LEAST_GAIN = 1.05  # of a step with drafts over one without
_TRY_EVERY = 64  # of looks in which nothing pays, one tries a token: costs and texts change
_RESTS_AFTER = 16  # steps in a row without proposals
_LOOKS_EVERY = 16  # steps while it rests
_KEPT_BESIDE = 0.995  # of the counts of a rank, at each wrong token


@dataclass(frozen=True, slots=True)
class Step:
    """A step without proposals: it computes `tokens` and gives `answered` ones. `room`: for proposed tokens."""

    tokens: int
    answered: int
    room: int


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a branch gives on average, of request `number` of the step."""

    number: int
    branch: Branch
    gain: float  # tokens

    @property
    def rows(self) -> int:
        return 1 + self.branch.count


class Speculator:
    """`most`: tokens proposed for one request in a step. `rests`: while nothing is proposed, it looks for proposals in
    few steps only, so that the others may be launched before the tokens of the step before are known. `adaptive`
    False: proposes as many as it can, whether they pay or not. `branches`: at most so many beside the drafted tokens of
    a request."""

    def __init__(
        self,
        most: int,
        proposer: Proposer | Drafting,
        *,
        rests: bool = False,
        adaptive: bool = True,
        branches: int = 0,
    ) -> None:
        self.most = most
        self._most_branches = branches
        self._adaptive = adaptive
        self._may_rest = rests
        self._steps_without = 0
        self._rested = 0  # steps since it looked, modulo _LOOKS_EVERY
        self.proposer = proposer
        self.drafting = proposer if isinstance(proposer, Drafting) else None
        self.costs = StepCosts()
        self.pass_costs = StepCosts()  # of the ranks' drafting, by rows
        self.proposed = self.accepted = self.refused = 0  # tokens; refused: that were compared and wrong
        self.step = 0  # that the ranks computed
        self._acceptance = Acceptance()
        self._beside = [Rate() for _ in range(branches)]  # by rank: how often it is right where the likeliest is wrong
        self._in_vain = 0  # looks in which something was found and nothing paid
        self._is_trying = False

    @property
    def is_resting(self) -> bool:
        """Whether the next step has no proposals, whatever the tokens before it are."""
        return self._may_rest and self._steps_without >= _RESTS_AFTER and self._rested + 1 < _LOOKS_EVERY

    def rests(self) -> bool:
        """Called once for each step that could have proposals."""
        resting = self.is_resting
        self._rested = self._rested + 1 if resting else 0
        return resting

    def propose(self, candidates: Sequence[Candidate], step: Step) -> list[Proposal]:
        """Proposals in the order of the candidates, many empty, at most `step.room` tokens in all."""
        for each in candidates:
            if each.state.step != self.step:
                each.state.sample = -1
        prospects = self.proposer.prospects(candidates, self.most)
        counts = self._counts(candidates, prospects, step)
        able = [(each.missing, number) for number, each in enumerate(prospects) if each is not None]
        if able and not any(counts):
            self._try_one(able, counts, step.room)
        self._steps_without = 0 if any(counts) else self._steps_without + 1
        for candidate, prospect in zip(candidates, prospects, strict=True):
            candidate.state.kind = 0 if prospect is None else prospect.kind
        if self.drafting is not None:
            drafts = self.drafting.drafts(candidates, counts)
            self._is_trying = self._is_trying and not any(each is not None and each.count for each in drafts)
            if self._most_branches:
                drafts = self._with_branches(candidates, drafts, step)
            return [NOTHING if each is None else Proposal(draft=each) for each in drafts]
        self._is_trying = self._is_trying and not any(counts)
        pairs = zip(prospects, counts, strict=True)
        return [NOTHING if each is None or not count else Proposal(each.tokens[:count]) for each, count in pairs]

    def found_nothing(self) -> None:
        """Of a step none of whose requests may have proposals."""
        self._steps_without += 1

    def _try_one(self, able: list[tuple[int, int]], counts: list[int], room: int) -> None:
        """Now and then a token of one request, and for a draft model in each step until it has drafted one: first it
        computes what it misses, where that is least. `able`: missing tokens and number of each."""
        self._in_vain += 1
        self._is_trying = self._is_trying or self._in_vain % _TRY_EVERY == 0
        if self._is_trying and room > 0:
            least = min(missing for missing, _ in able)
            ready = [number for missing, number in able if missing == least]
            counts[ready[self._in_vain // _TRY_EVERY % len(ready)]] = 1

    def _counts(self, candidates: Sequence[Candidate], prospects: list[Prospect | None], step: Step) -> list[int]:
        chances = [
            0.0 if prospect is None else self._acceptance.of(each.state.rate, prospect.kind)
            for each, prospect in zip(candidates, prospects, strict=True)
        ]
        most = [0 if prospect is None else prospect.count for prospect in prospects]
        if not self._adaptive:
            before = accumulate(most, initial=0)
            return [max(0, min(count, step.room - taken)) for count, taken in zip(most, before, strict=False)]
        if self.drafting is None:
            return self._of_text(chances, most, step)
        return self._of_drafts(chances, most, step, at_once=self.drafting.at_once)

    def _of_text(self, chances: list[float], most: list[int], step: Step) -> list[int]:
        """Adds the likeliest token of all again and again, as long as the tokens that the step gives for its time rise
        by it."""
        fixed_s, token_s = self.costs.line()
        counts = [0] * len(chances)
        queue = [(-chance, number) for number, chance in enumerate(chances) if most[number]]
        heapq.heapify(queue)
        answered, computed = float(step.answered), step.tokens
        while queue and computed < step.tokens + step.room:
            negative, number = heapq.heappop(queue)
            if -negative * (fixed_s + token_s * computed) <= _MARGIN * token_s * answered:
                break
            counts[number] += 1
            answered, computed = answered - negative, computed + 1
            if counts[number] < most[number]:
                heapq.heappush(queue, (negative * chances[number], number))
        return counts

    def _of_drafts(self, chances: list[float], most: list[int], step: Step, *, at_once: bool) -> list[int]:
        """Adds the next token of each request whose next one pays, again and again, and keeps the best so far. Each
        round costs the ranks a pass, unless they draft all `at_once`."""
        fixed_s, token_s = self.costs.line()
        pass_s, row_s = self._pass_line(fixed_s, token_s)
        answered, seconds, room = float(step.answered), fixed_s + token_s * step.tokens, step.room
        counts, best, best_rate = [0] * len(chances), [0] * len(chances), _LEAST_GAIN * answered / seconds
        for depth in range(1, max(most, default=0) + 1):
            gains = {number: chance**depth for number, chance in enumerate(chances) if depth <= most[number]}
            paying = [number for number, gain in gains.items() if gain * seconds > (token_s + row_s) * answered][:room]
            if not paying:
                break
            for number in paying:
                counts[number] = depth
            room -= len(paying)
            answered += sum(gains[number] for number in paying)
            seconds += len(paying) * (token_s + row_s) + (pass_s if depth == 1 or not at_once else 0.0)
            if answered / seconds > best_rate:
                best, best_rate = [*counts], answered / seconds
        return best

    def _with_branches(
        self, candidates: Sequence[Candidate], drafts: list[Draft | None], step: Step
    ) -> list[Draft | None]:
        """The drafts with branches, those that give most for what they cost first, as long as they pay."""
        fixed_s, token_s = self.costs.line()
        pass_s, row_s = self._pass_line(fixed_s, token_s)
        chances = [self._acceptance.of(each.state.rate, each.state.kind) for each in candidates]
        counts = [0 if each is None else each.count for each in drafts]
        drafted = sum(counts)
        room, seconds = step.room - drafted, fixed_s + pass_s + token_s * step.tokens + (token_s + row_s) * drafted
        answered = step.answered + sum(
            chance**depth for chance, count in zip(chances, counts, strict=True) for depth in range(1, count + 1)
        )
        least = _MARGIN * token_s * answered / seconds if self._adaptive else 0.0  # tokens that a row has to give
        most = [count if each.may_branch else 0 for each, count in zip(candidates, counts, strict=True)]
        worths = sorted(self._worths(chances, most, least), key=lambda each: -each.gain / each.rows)
        found = [list[Branch]() for _ in drafts]
        for worth in worths:
            if self._adaptive and worth.gain * seconds <= _MARGIN * token_s * worth.rows * answered:
                break
            if worth.rows <= room and len(found[worth.number]) < self._most_branches:
                found[worth.number].append(worth.branch)
                room, answered, seconds = room - worth.rows, answered + worth.gain, seconds + token_s * worth.rows
        return [
            each and msgspec.structs.replace(each, beside=self._most_branches, branches=tuple(branches))
            for each, branches in zip(drafts, found, strict=True)
        ]

    def _worths(self, chances: Sequence[float], most: Sequence[int], least: float) -> Iterator[_Worth]:
        """Of the branches of at most `most` tokens that give more than `least` for each of their rows."""
        ranks = [rate.value(prior=0.1, weight=4.0) for rate in self._beside]
        for number, (chance, longest) in enumerate(zip(chances, most, strict=True)):
            for shared in range(longest):
                wrong_here = chance**shared * (1 - chance)
                if wrong_here * (longest - shared) <= 2 * least:
                    break  # of later places too
                for rank, right in enumerate(ranks, 1):
                    gain = each = wrong_here * right
                    count = shared + 1
                    while count < longest and each * chance > least:
                        each *= chance
                        gain, count = gain + each, count + 1
                    if gain > least * (1 + count):
                        yield _Worth(number, Branch(shared, rank, count), gain)

    def _pass_line(self, fixed_s: float, token_s: float) -> tuple[float, float]:
        """Before the first pass it is taken to cost a fifth of a step."""
        return self.pass_costs.line() if self.pass_costs.is_known else (fixed_s / 5, token_s / 5)

    def learn(self, state: Speculation, verified: Verified) -> None:
        self.proposer.learn(state, verified)
        if verified.proposed:
            self.proposed += verified.proposed
            self.accepted += verified.accepted + verified.of_branch
            self.refused += verified.compared - verified.accepted
            self._acceptance.learn(state.rate, state.kind, verified.compared, verified.accepted)
            if verified.accepted < verified.compared:
                for rank, rate in enumerate(self._beside, 1):
                    rate.learn(1, int(rank == verified.rank), _KEPT_BESIDE)
