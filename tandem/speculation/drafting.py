"""Proposers whose tokens the ranks draft in the step itself: what the leader knows of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.speculation.proposers import Candidate, Draft, Prospect, Speculation, Verified

MISSING_PER_TOKEN = 32  # tokens that a draft model may have to compute for each that the answer may still have
CATCH_UP = 256  # tokens that a draft model computes in a step, of all requests that it does not know yet


class EarlyExit:
    """The model's own first layers. Their KV is in the pool already."""

    name = "early_exit"
    at_once = False

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        return [_prospect(each, most) for each in candidates]

    def drafts(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Draft | None]:
        return [Draft(count) if count else None for count in counts]

    def learn(self, state: Speculation, verified: Verified) -> None:
        """Nothing is kept from step to step."""


class DraftModel:
    """A smaller model, whose KV is beside the model's. It computes a request's tokens that it does not know before it
    drafts: all of them after a handoff or a preemption, one after a step whose drafted tokens were all right.

    Args: `most_tokens`: its context.
    """

    name = "draft"
    at_once = False

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        return [self._prospect(each, most) for each in candidates]

    def _prospect(self, candidate: Candidate, most: int) -> Prospect | None:
        """None too for an answer that is too short to pay for what the draft model has to compute first."""
        known = len(candidate.tokens) - candidate.pending
        missing = known - candidate.state.drafted
        if missing > MISSING_PER_TOKEN * candidate.most:
            return None
        return _prospect(candidate, min(most, self._most_tokens - len(candidate.tokens)), missing)

    def drafts(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Draft | None]:
        budget, found = CATCH_UP, list[Draft | None]()
        for each, count in zip(candidates, counts, strict=True):
            begin, known = each.state.drafted, len(each.tokens) - each.pending
            if not count or (begin < known and not budget):
                found.append(None)
                continue
            end = min(known, begin + budget)
            budget -= end - begin
            found.append(Draft(count if end == known else 0, begin, end))
        return found

    def learn(self, state: Speculation, verified: Verified) -> None:
        draft = verified.draft
        if draft is not None:
            # The last drafted token is not computed by the one who drafts it.
            state.drafted = verified.start + min(verified.accepted, draft.count - 1) if draft.count else draft.end


class Heads:
    """Heads on the model's last hidden state: a request has one only if it was in the last step."""

    at_once = True

    def __init__(self, name: str, heads: int) -> None:
        self.name = name
        self._heads = heads

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        return [
            _prospect(each, min(most, self._heads)) if each.state.sample >= 0 and each.pending == 1 else None
            for each in candidates
        ]

    def drafts(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Draft | None]:
        pairs = zip(candidates, counts, strict=True)
        return [Draft(count, sample=each.state.sample) if count else None for each, count in pairs]

    def learn(self, state: Speculation, verified: Verified) -> None:
        """Nothing is kept but where the hidden state is, which the engine notes."""


class States(Heads):
    """A layer on hidden states, token after token."""

    at_once = False

    def __init__(self, name: str) -> None:
        super().__init__(name, sys.maxsize)


def _prospect(candidate: Candidate, most: int, missing: int = 0) -> Prospect | None:
    count = min(candidate.most, most)
    return Prospect(count, kind=1, missing=missing) if count > 0 else None
