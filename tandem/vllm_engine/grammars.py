"""Our grammars in vLLM's place for its own: what may follow an answer is found by `tandem.grammar.masks`, in threads,
while the model computes, and vLLM's sampler gets it as the rows of a mask.

A grammar's state is a function of the answer's tokens, so an answer that began elsewhere needs nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from tandem.errors import TandemError
from tandem.grammar.masks import Following, GrammarRun

WAIT_S = 0.1  # for a mask, at a time
_WORD_BITS = 32


def mask_backend(vocab_size: int) -> Any:
    """What vLLM asks for a mask of so many rows, each of a bit per token."""
    words = -(-vocab_size // _WORD_BITS)
    return SimpleNamespace(
        allocate_token_bitmask=lambda rows: torch.full((rows, words), -1, dtype=torch.int32), destroy=lambda: None
    )


class AnswerGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """Of one request. `tokens`: of its prompt and answer, as vLLM has them. `is_late`: called while a step waits for
    its mask. `failed`: why no token could be chosen."""

    def __init__(self, run: GrammarRun, tokens: Sequence[int], is_late: Callable[[], None]) -> None:
        self._run = run
        self._tokens = tokens
        self._is_late = is_late
        self._found: Following | None = None
        self.failed: TandemError | None = None

    def asked(self, grammar: str) -> StructuredOutputRequest:
        """What vLLM's request has."""
        return StructuredOutputRequest(StructuredOutputsParams(grammar=grammar), self)

    @property
    def is_compiled(self) -> bool:
        return self._run.is_compiled

    def prepare(self) -> None:
        """Begins to find what may follow."""
        self._run.prepare(self._tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Waits until it is known. A request that fails gets any token, and ends."""
        row = bitmask[batch_index].numpy()
        try:
            while (found := self._run.take(self._tokens, WAIT_S)) is None:
                self._is_late()  # `take` raises after MAX_LATE_S
        except TandemError as error:
            self.failed = error
            row.fill(-1)
            return
        self._found = found
        row.fill(0)
        if found.forced:
            row.view(np.uint32)[found.forced[0] // _WORD_BITS] = 1 << found.forced[0] % _WORD_BITS
        elif found.allowed is not None:
            packed = np.packbits(found.allowed, bitorder="little")
            row.view(np.uint8)[: len(packed)] = packed

    def is_whole_after(self, token: int) -> bool:
        """Whether nothing may follow `token`, which the last mask allowed."""
        found, self._found = self._found, None
        return found is not None and self._run.after(found, token).is_complete

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        pass

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        pass
