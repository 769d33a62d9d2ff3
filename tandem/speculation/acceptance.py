"""How likely a proposed token is the one that the model chooses, learnt from those before."""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 0.9  # of a request's own counts, at each of its verifications
_KEPT_OF_ALL = 0.995
_WEIGHT_OF_ALL = 4.0  # tokens of the request's own that count as much as what all requests say


@dataclass(slots=True)
class Rate:
    """Accepted tokens and refusals, the recent ones with more weight."""

    accepted: float = 0.0
    refused: float = 0.0

    def learn(self, compared: int, accepted: int, kept: float) -> None:
        """Of `compared` tokens the first `accepted` were right, and the next one, if there is one, was wrong."""
        self.accepted = self.accepted * kept + accepted
        self.refused = self.refused * kept + (accepted < compared)

    def value(self, prior: float, weight: float) -> float:
        return (self.accepted + prior * weight) / (self.accepted + self.refused + weight)


@dataclass(slots=True)
class Acceptance:
    """Of all requests of an engine, by the proposer's `kind` of proposal."""

    of_kinds: dict[int, Rate] = field(default_factory=dict)

    def of(self, own: Rate, kind: int) -> float:
        """The probability that one more token is accepted if those before it were."""
        of_all = self.of_kinds.get(kind, Rate()).value(prior=0.6, weight=2.0)
        return own.value(prior=of_all, weight=_WEIGHT_OF_ALL)

    def learn(self, own: Rate, kind: int, compared: int, accepted: int) -> None:
        own.learn(compared, accepted, _KEPT)
        self.of_kinds.setdefault(kind, Rate()).learn(compared, accepted, _KEPT_OF_ALL)
