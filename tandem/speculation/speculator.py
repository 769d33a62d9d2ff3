"""Proposes tokens for the requests of a step, as many as pay.

The model computes a request's last token and the proposed ones in one step, and chooses a token after each. A proposed
token is accepted exactly if it is the one that the model chose, so an answer is the same with and without proposals.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.acceptance import Acceptance, Rate
from tandem.speculation.lookup import Found, TokenIndex
from tandem.speculation.step_costs import StepCosts

log = logging.getLogger(__name__)

_INDEXED_AT_ONCE = 2048  # tokens in a step: about a millisecond
_MARGIN = 1.15  # a token has to pay that much more than it costs: choosing and reporting it costs too
_TRY_EVERY = 64  # of steps in which nothing pays, one tries a token: costs and texts change


@dataclass(slots=True)
class Speculation:
    """What is known of one request."""

    index: TokenIndex = field(default_factory=TokenIndex)
    rate: Rate = field(default_factory=Rate)
    match: int = 0  # of the proposal under way
    has_failed: bool = False  # nothing is proposed any more


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may take `most` proposed tokens after `tokens`."""

    state: Speculation
    tokens: list[int]
    most: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step without proposals: it computes `tokens` and gives `answered` ones. `room`: for proposed tokens."""

    tokens: int
    answered: int
    room: int


class Speculator:
    """`most`: tokens proposed for one request in a step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.costs = StepCosts()
        self.proposed = self.accepted = 0
        self._acceptance = Acceptance()
        self._in_vain = 0  # steps in which something was found and nothing paid

    def propose(self, candidates: Sequence[Candidate], step: Step) -> list[tuple[int, ...]]:
        """Proposals in the order of the candidates, many empty, at most `step.room` tokens in all."""
        found = self._found(candidates)
        states = [each.state for each in candidates]
        lengths = self._lengths(states, found, step)
        if not any(lengths) and (able := [number for number, each in enumerate(found) if each is not None]):
            self._in_vain += 1
            tries, rest = divmod(self._in_vain, _TRY_EVERY)
            if rest == 0 and step.room > 0:
                lengths[able[tries % len(able)]] = 1
        proposals: list[tuple[int, ...]] = []
        for state, each, length in zip(states, found, lengths, strict=True):
            proposals.append(() if each is None else each.tokens[:length])
            state.match = 0 if each is None else each.match
        return proposals

    def _found(self, candidates: Sequence[Candidate]) -> list[Found | None]:
        """Indexes long prompts over several steps, few tokens at once for all requests together."""
        budget, found = _INDEXED_AT_ONCE, list[Found | None]()
        for each in candidates:
            try:
                index, lag = each.state.index, each.state.index.lag(each.tokens)
                count = lag if lag <= self.most + 1 else min(lag, budget)
                index.extend(each.tokens, count)
                budget -= count if lag > self.most + 1 else 0
                found.append(None if each.state.has_failed else index.find(each.tokens, min(each.most, self.most)))
            except Exception:  # the answer goes on without proposals
                log.warning("nothing is proposed any more for a request: look-up failed", exc_info=True)
                each.state.has_failed = True
                found.append(None)
        return found

    def _lengths(self, states: list[Speculation], found: list[Found | None], step: Step) -> list[int]:
        """Adds the likeliest token of all again and again, as long as the tokens that the step gives for its time rise
        by it."""
        fixed_s, token_s = self.costs.line()
        lengths = [0] * len(found)
        chances: list[tuple[float, int, float]] = []
        for number, (state, each) in enumerate(zip(states, found, strict=True)):
            if each is not None:
                chance = self._acceptance.of(state.rate, each.match)
                chances.append((-chance, number, chance))
        heapq.heapify(chances)
        answered, computed = float(step.answered), step.tokens
        while chances and sum(lengths) < step.room:
            negative, number, chance = heapq.heappop(chances)
            if -negative * (fixed_s + token_s * computed) <= _MARGIN * token_s * answered:
                break
            lengths[number] += 1
            answered, computed = answered - negative, computed + 1
            each = found[number]
            if each is not None and lengths[number] < len(each.tokens):
                heapq.heappush(chances, (negative * chance, number, chance))
        return lengths

    def learn(self, state: Speculation, proposed: int, compared: int, accepted: int) -> None:
        """Of `proposed` tokens `compared` ones were compared with what the model chose: up to the first wrong one, or
        to where the answer ended or its grammar took over."""
        self.proposed += proposed
        self.accepted += accepted
        self._acceptance.learn(state.rate, state.match, compared, accepted)
