"""The digest of a piece in device memory: a keyed multilinear hash modulo 2^64, on any torch device.

With w the 32-bit words of one head of one layer of one block (K or V), k and K streams of random odd 64-bit numbers
from the link's key, and the rows r in canonical order (block, layer, K/V, head):

    row    r = Σ w_i · k_i           digest = Σ low(r_j) · K_2j + high(r_j) · K_2j+1

Two different pieces of one shape have the same digest with a probability of at most 2^-31 over the keys, unless the
difference was chosen with knowledge of the key (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
Integer sums do not depend on their order. This is the reference; `triton_copy` computes the same in its pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_WORDS, _ROWS = 0, 1  # numbers of the streams
_MASK = (1 << 64) - 1


class DigestKeys:
    """The two streams of one link's key, on its device. Used only in the link's thread.

    Args:
        row_words: 32-bit words of a full row.
    """

    def __init__(self, key: int, row_words: int, device: torch.device) -> None:
        self._key = key
        self._device = device
        self.words = self._stream(_WORDS, row_words)
        self._rows = self._stream(_ROWS, 1024)

    def rows(self, count: int) -> Tensor:
        """At least `count` numbers of the stream of rows. A later call may replace the tensor, so keep it while a
        kernel reads it."""
        if len(self._rows) < count:
            self._rows = self._stream(_ROWS, 1 << (count - 1).bit_length())
        return self._rows

    def digest(self, parts: Iterable[Tensor]) -> int:
        """The digest of int32 views [..., tokens, words of a token], in canonical order."""
        rows = torch.cat([self._row_sums(part).reshape(-1) for part in parts])
        entries = rows.view(torch.int32)
        return int((entries * self.rows(len(entries))[: len(entries)]).sum().item()) & _MASK

    def _row_sums(self, part: Tensor) -> Tensor:
        tokens, words = part.shape[-2:]
        return (part * self.words[: tokens * words].view(tokens, words)).sum((-2, -1))

    def _stream(self, number: int, count: int) -> Tensor:
        """The first `count` numbers of a stream. numpy guarantees Philox's bits across versions."""
        raw = np.random.Philox(key=np.array([self._key, number], np.uint64)).random_raw(count)
        return torch.from_numpy((raw | np.uint64(1)).view(np.int64)).to(self._device)
