"""The tokens that penalties apply to: those a request has seen, and how often it generated each. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenHistory:
    """The prompt's tokens, and the output's tokens with their counts."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
        self.prompt: Ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._answer = Counter(answer)

    def extend(self, answer: Sequence[int]) -> None:
        self._answer.update(answer)

    def answer(self) -> tuple[Ids, NDArray[np.int64]]:
        """The output's distinct tokens, and the count of each."""
        size = len(self._answer)
        ids = np.fromiter(self._answer, dtype=np.int64, count=size)
        return ids, np.fromiter(self._answer.values(), dtype=np.int64, count=size)

    @property
    def answer_tokens(self) -> int:
        return sum(self._answer.values())

    def seen(self) -> Ids:
        """Tokens of prompt and output; a token in both appears twice."""
        return np.concatenate([self.prompt, self.answer()[0]])
