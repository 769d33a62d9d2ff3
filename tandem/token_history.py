"""What penalties look at: which tokens a request has seen, and how often it said each. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenHistory:
    """The prompt's tokens, and the answer's with their counts. Grows with the answer."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
        self._prompt: Ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._answer = Counter(answer)

    def extend(self, answer: Sequence[int]) -> None:
        self._answer.update(answer)

    def answer(self) -> tuple[Ids, NDArray[np.int64]]:
        """The answer's tokens, each once, and how often each occurs."""
        size = len(self._answer)
        ids = np.fromiter(self._answer, dtype=np.int64, count=size)
        return ids, np.fromiter(self._answer.values(), dtype=np.int64, count=size)

    def seen(self) -> Ids:
        """Tokens of prompt and answer; one that is in both comes twice."""
        return np.concatenate([self._prompt, self.answer()[0]])
