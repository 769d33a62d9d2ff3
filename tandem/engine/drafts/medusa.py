"""Medusa: heads on the last hidden state, each for a token further ahead (Cai et al., 2024, arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.drafts.drafter import Computed, draw_of, likeliest
from tandem.engine.drafts.parts import Parts, Projection
from tandem.engine.step import Drafted, SequenceStep
from tandem.model.decoder import Decoder

_MOST_HEADS: Final = 64
_MOST_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """x + SiLU(W x + b). weight [hidden, hidden], bias [hidden]"""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x + F.silu(F.linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Head:
    blocks: tuple[ResidualBlock, ...]
    project: Projection

    def transformed(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Medusa:
    """Head i, from 0, drafts the i-th token after a request's last one, from the hidden state that chose that one."""

    def __init__(self, model: Decoder, heads: Sequence[Head]) -> None:
        self.taps: tuple[int, ...] = ()
        self.heads = tuple(heads)
        self._model = model
        self._hidden: Tensor | None = None
        self.after_layer: Callable[[], None] | None = None
        self.passes = self.rows = 0

    @classmethod
    def load(cls, parts: Parts) -> Medusa:
        """The published format, or one where all heads share `lm_head.weight`."""
        count = parts.count("medusa_num_heads", _MOST_HEADS)
        blocks = parts.count("medusa_num_layers", _MOST_BLOCKS, default=1)
        hidden = parts.model.config.hidden_size
        shared = parts.projection("lm_head.weight")

        def block(name: str) -> ResidualBlock:
            return ResidualBlock(parts.tensor(f"{name}.weight", hidden, hidden), parts.tensor(f"{name}.bias", hidden))

        def head(number: int) -> Head:
            own = f"{number}.{blocks}.weight"
            return Head(
                tuple(block(f"{number}.{place}.linear") for place in range(blocks)),
                parts.projection(own) if own in parts.tensors else shared,
            )

        return cls(parts.model, [head(number) for number in range(count)])

    def keep(self, step: Computed) -> None:
        self._hidden = step.hidden

    def draft(self, sequences: Sequence[SequenceStep]) -> list[Drafted]:
        drafts = {place: each.draft for place, each in enumerate(sequences) if each.draft and each.draft.count}
        self.passes, self.rows = int(bool(drafts)), sum(draft.count for draft in drafts.values())
        drafted: list[list[tuple[int, ...]]] = [[] for _ in sequences]
        if self._hidden is not None and drafts:
            normed = self._model.normed(self._hidden[[draft.sample for draft in drafts.values()]])
            wanted = [
                (number, row, place)
                for number in range(len(self.heads))
                for row, (place, draft) in enumerate(drafts.items())
                if draft.count > number
            ]
            draws = [draw_of(drafts[place], number) for number, _, place in wanted]
            logits = self._logits(normed, [(number, row) for number, row, _ in wanted])
            found = likeliest(logits, draws, 1 + max(draft.beside for draft in drafts.values()))
            for (_, _, place), tokens in zip(wanted, found, strict=True):
                drafted[place].append(tokens)
        return [Drafted(tuple(each[0] for each in places), tuple(each[1:] for each in places)) for places in drafted]

    def _logits(self, normed: Tensor, wanted: Sequence[tuple[int, int]]) -> Tensor:
        """[wanted, vocab_size], of pairs of head and row, by head. Heads that share a projection take one product."""
        parts: list[tuple[Projection, list[Tensor]]] = []
        for number in sorted({number for number, _ in wanted}):
            head, rows = self.heads[number], [row for other, row in wanted if other == number]
            if not parts or parts[-1][0] is not head.project:
                parts.append((head.project, []))
            parts[-1][1].append(head.transformed(normed[rows]))
        return torch.cat([project(torch.cat(states)) for project, states in parts])
