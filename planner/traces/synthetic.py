"""Synthetic traffic from an arrival process, length distributions and prefixes that prompts share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.traces.arrivals import ArrivalProcess
from planner.traces.trace import PrefixBlocks, TrafficTrace
from tandem.errors import InputError

BLOCK_TOKENS = 16
MOST_TOKENS = 1 << 20
MOST_CV = 100.0


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Lognormal lengths with mean `mean` and coefficient of variation `cv`; `cv` 0 gives equal lengths."""

    mean: float
    cv: float = 0.0
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if not (1 <= self.mean <= self.most):
            raise InputError(f"mean: expected 1 to {self.most} tokens, got {self.mean:g}", field="mean")
        if not 0 <= self.cv <= MOST_CV:
            raise InputError(f"cv: expected 0 to {MOST_CV:g}, got {self.cv:g}", field="cv")

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        variance = math.log(1 + self.cv**2)
        drawn = random.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """`share` of the requests begin with one of `count` prefixes of `tokens` tokens. The k-th is 1/k times as frequent
    as the first (Zipf), like system prompts and documents."""

    count: int
    tokens: int
    share: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.count <= MOST_TOKENS and 1 <= self.tokens <= MOST_TOKENS and 0 <= self.share <= 1):
            raise InputError(
                f"shared prefixes: expected a count and tokens from 1 to {MOST_TOKENS}, and a share from 0 to 1, got "
                f"{self.count}, {self.tokens}, {self.share:g}",
                field="prefixes",
            )


def synthetic_trace(
    count: int,
    arrivals: ArrivalProcess,
    prompt: LengthSpec,
    output: LengthSpec,
    *,
    prefixes: SharedPrefixes | None = None,
    seed: int = 0,
) -> TrafficTrace:
    """With `prefixes`, a prompt is a shared prefix followed by tokens of its own; `prompt` gives their number."""
    if count < 1:
        raise InputError(f"requests: expected at least 1, got {count}", field="requests")
    random = np.random.default_rng(seed)
    arrival_s = arrivals.times_s(count, random)
    own_tokens, answers = prompt.draw(count, random), output.draw(count, random)
    shared, prompt_tokens = None, own_tokens
    if prefixes is not None:
        shared, shared_tokens = _share(prefixes, count, random)
        prompt_tokens = own_tokens + shared_tokens
    means = f"prompts of {prompt_tokens.mean():.0f}, answers of {answers.mean():.0f} tokens on average"
    note = f"{arrivals.describe()}, {means}"
    return TrafficTrace("synthetic", arrival_s - arrival_s[0], prompt_tokens, answers, shared, notes=(note,))


def _share(spec: SharedPrefixes, count: int, random: np.random.Generator) -> tuple[PrefixBlocks, NDArray[np.int64]]:
    weights = 1 / np.arange(1, spec.count + 1)
    which = random.choice(spec.count, count, p=weights / weights.sum())
    shares = random.random(count) < spec.share
    blocks = spec.tokens // BLOCK_TOKENS  # the last, partial block of a prefix cannot be reused
    rows = np.where(shares, blocks, 0)
    ids = [prefix * blocks + np.arange(blocks) for prefix in which[shares]]
    return (
        PrefixBlocks(BLOCK_TOKENS, np.concatenate([*ids, np.empty(0, np.int64)]).astype(np.int64), np.cumsum(rows)),
        np.where(shares, spec.tokens, 0),
    )
