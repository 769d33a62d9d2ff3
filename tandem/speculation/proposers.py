"""What a proposer says before a step, and what it hears after it.

Some proposers know tokens at once, from text alone. For others the ranks draft tokens at the beginning of the step
(`tandem/engine/drafts/`): how many is decided before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec

from tandem.speculation.acceptance import Rate
from tandem.speculation.lookahead import Guesses
from tandem.speculation.lookup import TokenIndex


@dataclass(slots=True)
class Speculation:
    """What is known of one request."""

    rate: Rate = field(default_factory=Rate)
    kind: int = 0  # of the proposal under way: how sure its proposer is of it
    from_prediction: bool = False  # is that proposal
    has_failed: bool = False  # nothing is proposed any more
    index: TokenIndex = field(default_factory=TokenIndex)  # look-up
    guesses: Guesses = field(default_factory=Guesses)  # lookahead
    drafted: int = 0  # draft model: leading tokens whose KV it has computed
    sample: int = -1  # heads: in step number `step`, the one that chose the last token; -1: none
    step: int = -1

    def moved(self) -> None:
        """Its blocks were replaced, so the draft model's KV is gone."""
        self.drafted = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may take `most` proposed tokens after `tokens`, of which the step computes the last `pending`."""

    state: Speculation
    tokens: list[int]
    most: int
    pending: int = 1


class Draft(msgspec.Struct, frozen=True):  # created for each request and step
    """What the ranks do for a request at the beginning of a step.

    Args:
        count: tokens to draft after its last one.
        begin, end: the draft model first computes its tokens from `begin` to `end`; all the step's but its pending
            ones, unless none is drafted.
        sample: of the last step, the one that chose its last token.
    """

    count: int
    begin: int = 0
    end: int = 0
    sample: int = -1


class Proposal(msgspec.Struct, frozen=True):
    """Either tokens or a draft of some, or nothing."""

    tokens: tuple[int, ...] = ()
    draft: Draft | None = None


NOTHING = Proposal()


class Prospect(msgspec.Struct, frozen=True):
    """What could be proposed for a request: `tokens`, or `count` ones that have to be drafted, after a draft model has
    computed `missing` ones. `kind`: requests have one chance for each kind."""

    count: int
    kind: int
    tokens: tuple[int, ...] = ()
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """Of `proposed` tokens after the first `start` of a request, `compared` ones were compared with what the model
    chose: up to the first wrong one, or to where the answer ended or its grammar took over. `run`: the answer's last
    token and what the model chose after it and the wrong ones that follow; empty if that is not known."""

    start: int
    proposed: int
    compared: int
    accepted: int
    draft: Draft | None = None
    run: tuple[int, ...] = ()


class Proposer(Protocol):
    """Of the requests of one engine. A request for which it fails gets no proposals any more."""

    name: str

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        """In the order of the candidates, of at most `most` tokens each."""
        ...

    def learn(self, state: Speculation, verified: Verified) -> None:
        """Not called for a step without its proposals."""
        ...


@runtime_checkable
class Drafting(Proposer, Protocol):
    """A proposer whose tokens the ranks draft. `at_once`: all of a request in one pass, not one after the other."""

    at_once: bool

    def drafts(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Draft | None]:
        """How the ranks draft so many tokens for each candidate; fewer where it is not ready for it."""
        ...
