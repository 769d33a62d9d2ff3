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
    """A request that may take `most` proposed tokens after `tokens`, of which the step computes the last `pending`.
    `may_branch`: and other ones beside them."""

    state: Speculation
    tokens: list[int]
    most: int
    pending: int = 1
    may_branch: bool = True


class Branch(msgspec.Struct, frozen=True):
    """Tokens beside those drafted, which are the likeliest ones: the first `shared` of them, then the `rank`-th after
    the likeliest, then theirs again, `count` in all. `blocks`: for the KV of these and of the token before them, from
    the block of that token on."""

    shared: int
    rank: int
    count: int
    blocks: tuple[int, ...] = ()

    def tokens(self, drafted: Sequence[int], beside: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """`beside`: by place, the tokens after the likeliest."""
        at = self.shared
        return (*drafted[:at], beside[at][self.rank - 1], *drafted[at + 1 : self.count])


class Draft(msgspec.Struct, frozen=True):  # created for each request and step
    """What the ranks do for a request at the beginning of a step.

    Args:
        count: tokens to draft after its last one.
        begin, end: the draft model first computes its tokens from `begin` to `end`; all the step's but its pending
            ones, unless none is drafted.
        sample: of the last step, the one that chose its last token.
        beside: how many tokens after the likeliest are drafted too for each place.
        branches: of these, computed in the step.
    """

    count: int
    begin: int = 0
    end: int = 0
    sample: int = -1
    beside: int = 0
    branches: tuple[Branch, ...] = ()


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
    token and what the model chose after it and the wrong ones that follow; empty if that is not known.

    `proposed` counts those of branches too. `compared` and `accepted` do not: `of_branch` ones more were accepted, from
    the first wrong one on. `rank`: of what the model chose there among the tokens drafted beside; 0: none of them."""

    start: int
    proposed: int
    compared: int
    accepted: int
    draft: Draft | None = None
    run: tuple[int, ...] = ()
    rank: int = 0
    of_branch: int = 0


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
