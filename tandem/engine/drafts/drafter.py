"""What drafts tokens on each rank at the beginning of a step, and the loop that most of them share.

All ranks of a worker draft the same tokens: their logits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.device.copies import to_device
from tandem.engine.output import best_of_any
from tandem.engine.step import Drafted, DraftStep, Draw, SequenceStep
from tandem.model.decoder import Attend, Decoder, StoringAttend
from tandem.sampling.philox import gumbel, words_of

_LIKELIEST = 64  # tokens among which one is drawn
AttendOf = Callable[[list[SequenceStep]], Attend]


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that the model has computed: `tokens` and `positions` [tokens] of its sequences; `hidden` [samples,
    hidden] of those that choose a token, after the last layer and before the last norm; `tapped` [tokens, hidden] by
    layer, if the drafter has `taps`: what each layer got."""

    sequences: Sequence[SequenceStep]
    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    tapped: Mapping[int, Tensor]
    attend: StoringAttend


class Drafter(Protocol):
    taps: tuple[int, ...]  # layers whose input it reads
    passes: int  # that the last draft took
    rows: int  # of hidden states or tokens that these computed
    after_layer: Callable[[], None] | None  # called during a draft, so that a long one shows that it computes

    def draft(self, sequences: Sequence[SequenceStep]) -> list[Drafted]:
        """As many tokens as `sequence.draft` says for each of `sequences`."""
        ...

    def keep(self, step: Computed) -> None:
        """Called after each step, before its `layers` are reported as written."""
        ...


class Chain:
    """Drafts token after token, those of all requests together.

    Args:
        model: computes the logits of tokens that it is given, with `layers` of its layers.
        attend_of: over the pool in which it keeps their KV.
        head: logits of hidden states.
        vocab_size: of the model that verifies, which may have other rows after the last token.
    """

    def __init__(
        self,
        model: Decoder,
        attend_of: AttendOf,
        device: torch.device,
        *,
        layers: int | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.taps: tuple[int, ...] = ()
        self._model = model
        self._attend_of = attend_of
        self._device = device
        self._of_model = layers
        self._head = head or model.logits
        self._vocab_size = vocab_size or model.config.vocab_size
        self.passes = self.rows = 0
        self.after_layer: Callable[[], None] | None = None

    def draft(self, sequences: Sequence[SequenceStep]) -> list[Drafted]:
        self.passes = self.rows = 0
        drafted: list[list[int]] = [[] for _ in sequences]
        inputs = {place: first for place, each in enumerate(sequences) if (first := _first(each)) is not None}
        while inputs:
            logits = self._logits(inputs)
            places = [place for place, each in inputs.items() if each.samples]
            draws = [draw_of(sequences[place].draft, len(drafted[place])) for place in places]
            following: dict[int, SequenceStep] = {}
            for place, (token,) in zip(places, likeliest(logits, draws), strict=True):
                drafted[place].append(token)
                sequence = sequences[place]
                if sequence.draft is not None and len(drafted[place]) < sequence.draft.count:
                    position = sequence.start + len(sequence.token_ids) + len(drafted[place]) - 1
                    following[place] = SequenceStep([token], position, sequence.blocks, samples=1)
            inputs = following
        return [Drafted(tuple(each)) for each in drafted]

    def _logits(self, inputs: Mapping[int, SequenceStep]) -> Tensor:
        """[sampling sequences, vocab_size]. `inputs`: of sequences, by their places in the step."""
        steps = [*inputs.values()]
        last = self._model.config.vocab_size - 1
        tokens = [min(token, last) for each in steps for token in each.token_ids]
        positions = [each.start + offset for each in steps for offset in range(len(each.token_ids))]
        ends = np.cumsum([len(each.token_ids) for each in steps])
        rows = [int(end) - 1 for each, end in zip(steps, ends, strict=True) if each.samples]
        hidden = self._model.hidden(
            to_device(np.array(tokens, dtype=np.int64), self._device),
            to_device(np.array(positions, dtype=np.int64), self._device),
            self._attend_of(steps),
            lambda _: None if self.after_layer is None else self.after_layer(),
            layers=self._of_model,
        )
        self.passes, self.rows = self.passes + 1, self.rows + len(tokens)
        sampled = hidden[to_device(np.array(rows, dtype=np.int64), self._device)]
        return self._head(sampled)[:, : self._vocab_size] if rows else sampled

    def keep(self, step: Computed) -> None:
        """It starts from tokens."""


def _first(sequence: SequenceStep) -> SequenceStep | None:
    """What the first pass computes of a request. Its block table may be longer than needed."""
    draft = sequence.draft
    if draft is None or not (draft.count or draft.missing):
        return None
    if not draft.count:
        return SequenceStep(draft.missing, draft.begin, sequence.blocks, samples=0)
    start = draft.begin if draft.missing else sequence.start
    return SequenceStep([*draft.missing, *sequence.token_ids], start, sequence.blocks, samples=1)


def draw_of(draft: DraftStep | None, number: int) -> Draw | None:
    return draft.draws[number] if draft is not None and draft.draws else None


def likeliest(logits: Tensor, draws: Sequence[Draw | None], count: int = 1) -> list[tuple[int, ...]]:
    """`count` tokens for each row of `logits` [rows, vocab_size], best first: by logits, or by these and the noise of
    its draw."""
    if count == 1 and not any(draws):
        return [(max(0, int(token)),) for token in best_of_any(logits, None).tolist()]  # any token, if none is finite
    top = logits.topk(min(_LIKELIEST, logits.shape[1]), dim=1)
    values, ids = top.values.double().cpu().numpy(), top.indices.cpu().numpy()
    orders = (
        None if draw is None else _order(row, each, draw) for row, each, draw in zip(values, ids, draws, strict=True)
    )
    return [
        tuple((row if order is None else row[order])[:count].tolist()) for row, order in zip(ids, orders, strict=True)
    ]


def _order(values: NDArray[np.float64], ids: NDArray[np.int64], draw: Draw) -> NDArray[np.int64]:
    """`values` [tokens], largest first. As tandem/sampling/sampler.py, on the likeliest tokens alone."""
    scaled = (values - values[0]) / draw.temperature
    likely = np.exp(scaled)
    kept = scaled >= np.log(draw.min_p) if draw.min_p > 0.0 else np.ones(len(scaled), dtype=np.bool_)
    if draw.top_k:
        kept[draw.top_k :] = False
    if draw.top_p < 1.0:
        kept[1:] &= np.cumsum(likely)[:-1] < draw.top_p * likely.sum()
    noisy = np.where(kept, scaled + gumbel(words_of(draw.seed, draw.position, ids)), -np.inf)
    return np.argsort(-noisy, kind="stable")
