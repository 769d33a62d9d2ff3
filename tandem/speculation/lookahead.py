"""Lookahead: what the model chose after wrong tokens is a guess at what it will choose later.

After Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding" (2023), and Fu et al.,
"Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2024): Jacobi iterations, whose runs of
tokens are kept and guessed again where their first token comes up.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_RUNS = 4096  # of a request; about 200 bytes each


class Guesses:
    """Of one request."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, ...]] = {}  # what followed a token, the latest
        self._next: tuple[int, ...] = ()

    def find(self, tokens: Sequence[int], most: int) -> tuple[tuple[int, ...], bool]:
        """At most `most` tokens that may follow `tokens`, and whether they are a kept run's. Without any guess they are
        the last of `tokens`: an iteration begins with whatever tokens."""
        run = self._runs.get(tokens[-1])
        if run is not None:
            return run[:most], True
        return (self._next or tuple(tokens[-most:]))[:most], False

    def learn(self, run: tuple[int, ...]) -> None:
        """`run`: as in `Verified`."""
        self._next = run[1:]
        for place in range(len(run) - 1):
            self._runs.pop(run[place], None)
            self._runs[run[place]] = run[place + 1 :]
        while len(self._runs) > _MOST_RUNS:
            del self._runs[next(iter(self._runs))]
