"""Proposes tokens for the requests of a step, as many as pay.

The model computes a request's last token and the proposed ones in one step, and chooses a token after each. A proposed
token is accepted exactly if it is the one that the model chose, so an answer is the same with and without proposals.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.speculation.acceptance import Acceptance, Rate
from tandem.speculation.lookup import Found, TokenIndex
from tandem.speculation.step_costs import StepCosts

_MARGIN = 1.15  # a token has to pay that much more than it costs: choosing and reporting it costs too
_TRY_EVERY = 64  # of steps in which nothing pays, one tries a token: costs and texts change


@dataclass(slots=True)
class Speculation:
    """What is known of one request."""

    index: TokenIndex = field(default_factory=TokenIndex)
    rate: Rate = field(default_factory=Rate)
    match: int = 0  # of the proposal under way


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may take `most` proposed tokens after `tokens`."""

    state: Speculation
    tokens: list[int]
    most: int


class Speculator:
    """`most`: tokens proposed for one request in a step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.costs = StepCosts()
        self.proposed = self.accepted = 0
        self._acceptance = Acceptance()
        self._in_vain = 0  # steps in which something was found and nothing paid

    def propose(self, candidates: Iterable[Candidate], step_tokens: int) -> list[tuple[int, ...]]:
        """Proposals in the order of the candidates, many empty. `step_tokens`: of the step without them."""
        found = [each.state.index.find(each.tokens, min(each.most, self.most)) for each in candidates]
        states = [each.state for each in candidates]
        lengths = self._lengths(states, found, step_tokens)
        if not any(lengths) and any(found):
            self._in_vain += 1
            if self._in_vain % _TRY_EVERY == 0:
                first = next(number for number, each in enumerate(found) if each is not None)
                lengths[first] = 1
        proposals: list[tuple[int, ...]] = []
        for state, each, length in zip(states, found, lengths, strict=True):
            proposals.append(() if each is None else each.tokens[:length])
            state.match = 0 if each is None else each.match
        return proposals

    def _lengths(self, states: list[Speculation], found: list[Found | None], step_tokens: int) -> list[int]:
        """Adds the likeliest token of all again and again, as long as the step's tokens for its time rise by it."""
        fixed_s, token_s = self.costs.line()
        lengths = [0] * len(found)
        chances: list[tuple[float, int, float]] = []
        for number, (state, each) in enumerate(zip(states, found, strict=True)):
            if each is not None:
                chance = self._acceptance.of(state.rate, each.match)
                chances.append((-chance, number, chance))
        heapq.heapify(chances)
        gained, computed = float(len(found)), step_tokens
        while chances:
            negative, number, chance = heapq.heappop(chances)
            if -negative * (fixed_s + token_s * computed) <= _MARGIN * token_s * gained:
                break
            lengths[number] += 1
            gained, computed = gained - negative, computed + 1
            each = found[number]
            if each is not None and lengths[number] < len(each.tokens):
                heapq.heappush(chances, (negative * chance, number, chance))
        return lengths

    def learn(self, state: Speculation, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted
        self._acceptance.learn(state.rate, state.match, proposed, accepted)
