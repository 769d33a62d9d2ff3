"""A step's output: tokens are chosen on the device, and only what is needed is copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.api import ScoredToken
from tandem.engine.device.copies import to_device
from tandem.engine.device.events import record_event
from tandem.engine.device.sampler import NOT_FINITE, UNDECIDED, DrawRows, Sampled, sample_on_device
from tandem.engine.step import Draw, SequenceStep
from tandem.native.library import Kernels
from tandem.request import TokenLogprob

Row = NDArray[np.float32]  # [vocab_size]
_MOST_PARTS: Final = 256  # of a row of logits


@dataclass(frozen=True, slots=True)
class Logprobs:
    """As in `Choice`."""

    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output for each sample, in the order of the sequences and of their tokens.

    `tokens`: the token that the device chose, else the one with the largest logit; None if logits are not finite.
    Of a masked sample `Launched.choose` gives the token. `logits`: None unless the host chooses. `logprobs`: by
    sample, if requested and computed on the device. `scores`: for each sequence with scored tokens. `late`: samples
    whose tokens were chosen after the device's, so a step launched ahead ran with other ones. `failed`: the error of
    samples whose output the host could not complete. `failed_exports`: requests, also of earlier steps, whose export
    could not be reported. `embeddings`: of samples for which they are wanted, as in `TokenOut`.
    """

    tokens: list[int | None]
    logits: list[Row | None]
    scores: list[tuple[ScoredToken, ...]]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    failed: dict[int, Exception] = field(default_factory=dict)
    failed_exports: frozenset[str] = frozenset()
    embeddings: dict[int, bytes] = field(default_factory=dict)

    def with_choice(self, choice: DeviceChoice) -> StepOutput:
        """With the tokens and logprobs of these samples. Waits for them. A sample that is not finite stays so."""
        chosen, tokens = choice.wait(), [*self.tokens]
        for sample in choice.samples:
            if tokens[sample] is not None and chosen.tokens[sample] != NOT_FINITE:
                tokens[sample] = chosen.tokens[sample]
        return replace(
            self, tokens=tokens, logprobs=self.logprobs | chosen.logprobs, failed=self.failed | chosen.failed
        )


def best_of(logits: Tensor) -> Tensor:
    """[rows, vocab_size] → [rows] int64 for `launched`. Ties go to the lowest id; NaN counts as largest."""
    rows, vocab = logits.shape
    parts = _parts_of(vocab)  # a GPU reads one long row with few of its processors
    values, ids = logits.reshape(rows, parts, vocab // parts).max(dim=2)
    part = values.argmax(dim=1, keepdim=True)
    best = ids.gather(1, part) + part * (vocab // parts)
    return best.where(values.gather(1, part).isfinite(), NOT_FINITE).squeeze(1)


@cache
def _parts_of(vocab: int) -> int:
    return max(parts for parts in range(1, _MOST_PARTS + 1) if vocab % parts == 0)


def best_of_any(logits: Tensor, kernels: Kernels | None) -> Tensor:
    """`best_of` outside recordings: on a CPU by native kernels or by numpy, which is ten times as fast."""
    if logits.device.type != "cpu":
        return best_of(logits)
    if kernels is not None:
        return kernels.best(logits)
    values = logits.numpy()
    best = values.argmax(axis=1)
    return torch.from_numpy(np.where(np.isfinite(values[np.arange(len(best)), best]), best, NOT_FINITE))


@dataclass(frozen=True, slots=True)
class Chosen:
    """As in `StepOutput`; `tokens` of all samples, some NOT_FINITE."""

    tokens: list[int]
    logprobs: dict[int, Logprobs]
    late: frozenset[int]
    failed: dict[int, Exception]


class DeviceChoice:
    """The tokens that the device chooses for the samples of `draws`, and their logprobs, on their way to the host."""

    def __init__(self, sampled: Sampled, draws: Mapping[int, Draw]) -> None:
        self._sampled = sampled
        self._draws = draws
        found = sampled.logprobs
        tokens = sampled.tokens.clone()  # it may be a view of what the next step overwrites
        copied = [tokens, *([] if found is None else [found.of_tokens, found.top_ids, found.top])]
        self._copies = [_host_copy(each) for each in copied]
        self._done = record_event(sampled.tokens.device)

    @property
    def samples(self) -> Collection[int]:
        return self._draws.keys()

    def wait(self) -> Chosen:
        """Waits until the device is done. Raises InternalError if it failed."""
        self._done.synchronize()
        tokens, *logprobs = self._copies
        chosen = tokens.tolist()
        late: set[int] = set()
        failed: dict[int, Exception] = {}
        for sample in (sample for sample, token in enumerate(chosen) if token == UNDECIDED):
            late.add(sample)
            try:
                chosen[sample] = self._sampled.decide(sample)
            except Exception as error:
                chosen[sample], failed[sample] = NOT_FINITE, error
        decided = {sample: chosen[sample] for sample in late - failed.keys()}
        return Chosen(chosen, self._logprobs(decided, *logprobs) if logprobs else {}, frozenset(late), failed)

    def _logprobs(self, late: dict[int, int], of_tokens: Tensor, ids: Tensor, top: Tensor) -> dict[int, Logprobs]:
        """By sample."""
        assert self._sampled.logprobs is not None
        wanted = {sample: draw.logprobs for sample, draw in self._draws.items() if draw.logprobs is not None}
        found: dict[int, Logprobs] = {}
        of_rows = zip(of_tokens.tolist(), ids.tolist(), top.tolist(), strict=True)
        for row, ((sample, count), (logprob, row_ids, row_top)) in enumerate(zip(wanted.items(), of_rows, strict=True)):
            if sample in late:
                logprob = self._sampled.logprobs.of_token(row, late[sample])
            pairs = zip(row_ids[:count], row_top[:count], strict=True)
            found[sample] = Logprobs(logprob, tuple(TokenLogprob(*pair) for pair in pairs))
        return found


class Launched:
    """A step given to the device, and its output once it is done.

    `tokens` [samples] int64, on the device, as in `Sampled`; valid until the next launch.

    Args:
        logits, best, last: as in `launched`.
        embedded: hidden states of the samples that embed.
        flush: waits until the step's exports are reported, and returns those that failed.
        draw_rows: as in `sample_on_device`.
    """

    def __init__(
        self,
        sequences: list[SequenceStep],
        logits: Tensor,
        best: Tensor,
        last: Tensor,
        scores: list[tuple[ScoredToken, ...]],
        flush: Callable[[], frozenset[str]] | None,
        draw_rows: DrawRows | None,
        embedded: Tensor | None,
    ) -> None:
        samples = [(each, number) for each in sequences for number in range(each.samples)]
        sequences = [each for each, _ in samples]
        self._sequences = sequences  # of each sample
        self._scores = scores
        self._flush = flush
        self._draw_rows = draw_rows
        self._embedded = None if embedded is None else _host_copy(embedded.float())
        self._draws = [each.draws[number] if each.draws else None for each, number in samples]
        draws = {sample: draw for sample, draw in enumerate(self._draws) if draw and not sequences[sample].masked}
        sampled = sample_on_device(logits, best, draws, last, None, draw_rows) if draws else Sampled(best)
        self.tokens = sampled.tokens
        of_host = [sample for sample, each in enumerate(sequences) if _is_for_host(each)]
        self._rows = _host_copy(logits[to_device(np.array(of_host), logits.device)]) if of_host else None
        self._undrawn = (logits, best, last) if any(each.masked for each in sequences) else None
        self._choice = DeviceChoice(sampled, draws)

    @torch.inference_mode()
    def choose(self, allowed: Mapping[int, NDArray[np.bool_]]) -> DeviceChoice:
        """Chooses the tokens of masked samples, after the step and before the next launch. `allowed`: as in
        `sample_on_device`."""
        assert self._undrawn is not None
        logits, best, last = self._undrawn
        drawn = {sample: draw for sample in allowed if (draw := self._draws[sample]) is not None}
        return DeviceChoice(sample_on_device(logits, best, drawn, last, allowed, self._draw_rows), drawn)

    def wait(self) -> StepOutput:
        """Waits until the device is done. Raises InternalError if it failed."""
        chosen = self._choice.wait()
        failed_exports = self._flush() if self._flush is not None else frozenset[str]()
        of_host = iter(() if self._rows is None else self._rows.numpy())
        return StepOutput(
            [None if token == NOT_FINITE else token for token in chosen.tokens],
            [next(of_host) if _is_for_host(each) else None for each in self._sequences],
            self._scores,
            chosen.logprobs,
            chosen.late,
            chosen.failed,
            failed_exports,
            self._embeddings(),
        )

    def _embeddings(self) -> dict[int, bytes]:
        if self._embedded is None:
            return {}
        rows = self._embedded.numpy().astype("<f4", copy=False)
        return {sample: row.tobytes() for sample, row in zip(embedding_samples(self._sequences), rows, strict=True)}


def launched(
    sequences: list[SequenceStep],
    logits: Tensor,
    best: Tensor,
    last: Tensor,
    scores: list[tuple[ScoredToken, ...]],
    flush: Callable[[], frozenset[str]] | None = None,
    draw_rows: DrawRows | None = None,
    embedded: Tensor | None = None,
) -> Launched:
    """logits [samples, vocab_size] fp32; best [samples]: `best_of` them; last [samples]: the token before each.
    embedded [samples that embed, hidden]: None without any."""
    return Launched(sequences, logits, best, last, scores, flush, draw_rows, embedded)


def embedding_samples(of_samples: Sequence[SequenceStep]) -> list[int]:
    """`of_samples`: the sequence of each sample."""
    return [sample for sample, each in enumerate(of_samples) if each.embeds]


def _is_for_host(sequence: SequenceStep) -> bool:
    return not sequence.greedy and not sequence.draws


def _host_copy(tensor: Tensor) -> Tensor:
    """The tensor in host memory; from a GPU asynchronously."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
