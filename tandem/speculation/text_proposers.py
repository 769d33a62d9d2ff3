"""Proposers that know tokens from a request's text alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tandem.speculation.lookup import Found
from tandem.speculation.proposers import Candidate, Prospect, Speculation, Verified

log = logging.getLogger(__name__)

_INDEXED_AT_ONCE = 2048  # tokens in a step: about a millisecond
_GUESS, _RUN = 1, 2  # kinds
_IN_PREDICTION = 8  # added to a kind


class Lookup:
    """What followed the last tokens when they came before, or in the client's prediction. Its kinds: how many of them
    agreed, and where."""

    name = "lookup"

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        """Indexes long prompts over several steps, few tokens at once for all requests together."""
        budget = _INDEXED_AT_ONCE

        def prospect(each: Candidate) -> Prospect | None:
            nonlocal budget
            index, lag = each.state.index, each.state.index.lag(each.tokens)
            count = lag if lag <= most + 1 else min(lag, budget)
            index.extend(each.tokens, count)
            budget -= count if lag > most + 1 else 0
            found = index.find(each.tokens, min(each.most, most))
            each.state.from_prediction = found is not None and found.from_prediction
            return None if found is None else Prospect(len(found.tokens), _kind(found), found.tokens)

        return [_unless_it_fails(prospect, each) for each in candidates]

    def learn(self, state: Speculation, verified: Verified) -> None:
        """The index reads the tokens themselves."""


class Lookahead:
    """Jacobi iterations."""

    name = "lookahead"

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        def prospect(each: Candidate) -> Prospect | None:
            if (count := min(each.most, most)) < 1:
                return None
            tokens, is_run = each.state.guesses.find(each.tokens, count)
            return Prospect(len(tokens), _RUN if is_run else _GUESS, tokens)

        return [_unless_it_fails(prospect, each) for each in candidates]

    def learn(self, state: Speculation, verified: Verified) -> None:
        state.guesses.learn(verified.run)


def _unless_it_fails(prospect: Callable[[Candidate], Prospect | None], candidate: Candidate) -> Prospect | None:
    try:
        return None if candidate.state.has_failed else prospect(candidate)
    except Exception:  # the answer goes on without proposals
        log.warning("nothing is proposed any more for a request: its proposer failed", exc_info=True)
        candidate.state.has_failed = True
        return None


def _kind(found: Found) -> int:
    """1, 2, 3 or 4, 5–8, 9–16, more; likewise in predictions."""
    return (found.match - 1).bit_length() + _IN_PREDICTION * found.from_prediction
