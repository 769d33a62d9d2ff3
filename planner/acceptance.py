"""Speculation as planned: the engine's own choice of how much is proposed, and drawn acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.speculation.proposers import Candidate, Draft, Prospect, Speculation, Verified
from tandem.speculation.speculator import Speculator

MOST_TOKENS = 64
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`chance`: that a proposed token is right if those before it were. `tokens`: most proposed for one request in a
    step. `draft_share`: time to draft a token, of a step's."""

    chance: float
    tokens: int = 8
    draft_share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Acceptance:
        """`0.7`, `0.7:4`, `0.7:4:0.1`. Raises ConfigError with the accepted forms."""
        try:
            chance, _, rest = text.partition(":")
            tokens, _, share = rest.partition(":")
            found = cls(float(chance), int(tokens or 8), float(share or 0))
        except ValueError:
            raise _wrong(text) from None
        if not found.is_possible:
            raise _wrong(text)
        return found

    @property
    def is_possible(self) -> bool:
        return 0 <= self.chance < 1 and 1 <= self.tokens <= MOST_TOKENS and 0 <= self.draft_share <= 1

    @property
    def most_per_step(self) -> float:
        """Tokens that a step gives a request at most, on average."""
        return (1 - self.chance ** (self.tokens + 1)) / (1 - self.chance)

    def speculator(self) -> Speculator:
        return Speculator(self.tokens, _KnownDrafts() if self.draft_share else _Known())

    def accepted(self, request: int, position: int, proposed: int) -> int:
        """How many of `proposed` tokens from `position` on are right: the same in each run."""
        for count in range(proposed):
            if _uniform(request, position + count) >= self.chance:
                return count
        return proposed


def chance_of(tokens_per_step: float, most: int) -> float:
    """The chance with which up to `most` proposed tokens give so many tokens a step."""
    low, high = 0.0, 0.999
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if Acceptance(middle, most).most_per_step < tokens_per_step else (low, middle)
    return low


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        "--acceptance: expected CHANCE[:TOKENS[:DRAFT_SHARE]] such as 0.7, 0.7:4 or 0.7:4:0.1, with a chance below 1, "
        f"1 to {MOST_TOKENS} tokens and a share from 0 to 1, got {text[:60]!r}",
        field="--acceptance",
    )


def _uniform(request: int, position: int) -> float:
    """From 0 to 1, by SplitMix64."""
    mixed = (request * _MIX + position * 0xBF58476D1CE4E5B9 + _MIX) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) / 2.0**64


class _Known:
    """Proposes tokens for every request. Which ones does not matter: a simulated request has no token values."""

    name = "simulated"

    def prospects(self, candidates: Sequence[Candidate], most: int) -> list[Prospect | None]:
        return [_prospect(min(each.most, most)) for each in candidates]

    def learn(self, state: Speculation, verified: Verified) -> None:
        """Nothing is kept."""


class _KnownDrafts(_Known):
    """The same, where a draft takes time."""

    at_once = False

    def drafts(self, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Draft | None]:
        return [Draft(count) if count else None for count in counts]


def _prospect(count: int) -> Prospect | None:
    return Prospect(count, 1, (0,) * count) if count > 0 else None
