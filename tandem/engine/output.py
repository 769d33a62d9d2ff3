"""A step's output: tokens are chosen on the device, and only what is needed is copied to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.api import ScoredToken
from tandem.engine.device.copies import to_device
from tandem.engine.device.events import record_event
from tandem.engine.device.sampler import NOT_FINITE, UNDECIDED, Sampled, sample_on_device
from tandem.engine.step import SequenceStep
from tandem.native.library import Kernels
from tandem.sampling.sampler import TokenLogprob

Row = NDArray[np.float32]  # [vocab_size]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """As in `Choice`."""

    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output for each sequence that samples, in order.

    `tokens`: the token that the device chose, else the one with the largest logit; None if logits are not finite.
    `logits`: None unless the host chooses. `logprobs`: by sequence, if requested and computed on the device. `scores`:
    for each sequence with scored tokens. `late`: sequences whose tokens were chosen after the device's, so a step
    launched ahead ran with other ones. `failed`: the error of sequences whose output the host could not complete.
    `failed_exports`: requests, also of earlier steps, whose export could not be reported.
    """

    tokens: list[int | None]
    logits: list[Row | None]
    scores: list[tuple[ScoredToken, ...]]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    failed: dict[int, Exception] = field(default_factory=dict)
    failed_exports: frozenset[str] = frozenset()


def best_of(logits: Tensor) -> Tensor:
    """[rows, vocab_size] → [rows] int64 for `launched`. Ties go to the lowest id; NaN counts as largest."""
    best = logits.argmax(dim=1)
    return best.where(logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite(), NOT_FINITE)


def best_of_any(logits: Tensor, kernels: Kernels | None) -> Tensor:
    """`best_of` outside recordings: on a CPU by native kernels or by numpy, which is ten times as fast."""
    if logits.device.type != "cpu":
        return best_of(logits)
    if kernels is not None:
        return kernels.best(logits)
    values = logits.numpy()
    best = values.argmax(axis=1)
    return torch.from_numpy(np.where(np.isfinite(values[np.arange(len(best)), best]), best, NOT_FINITE))


class Launched:
    """A step given to the device, and its output once it is done.

    `tokens` [samples] int64, on the device, as in `Sampled`; valid until the next launch.

    Args:
        rows: logits of the samples that the host chooses.
        flush: waits until the step's exports are reported, and returns those that failed.
    """

    def __init__(
        self,
        sequences: list[SequenceStep],
        sampled: Sampled,
        rows: Tensor,
        scores: list[tuple[ScoredToken, ...]],
        flush: Callable[[], frozenset[str]] | None,
    ) -> None:
        self.tokens = sampled.tokens
        self._sequences = sequences  # that sample
        self._sampled = sampled
        self._scores = scores
        self._flush = flush
        found = sampled.logprobs
        tokens = sampled.tokens.clone()  # it may be a view of what the next step overwrites
        copied = [tokens, rows, *([] if found is None else [found.of_tokens, found.top_ids, found.top])]
        self._copies = [_host_copy(each) for each in copied]
        self._done = record_event(self.tokens.device)

    def wait(self) -> StepOutput:
        """Waits until the device is done. Raises InternalError if it failed."""
        self._done.synchronize()
        failed_exports = self._flush() if self._flush is not None else frozenset[str]()
        tokens, rows, *logprobs = self._copies
        chosen = tokens.tolist()
        late: set[int] = set()
        failed: dict[int, Exception] = {}
        for sample in (sample for sample, token in enumerate(chosen) if token == UNDECIDED):
            late.add(sample)
            try:
                chosen[sample] = self._sampled.decide(sample)
            except Exception as error:
                chosen[sample], failed[sample] = NOT_FINITE, error
        of_host = iter(rows.numpy())
        return StepOutput(
            [None if token == NOT_FINITE else token for token in chosen],
            [next(of_host) if _is_for_host(each) else None for each in self._sequences],
            self._scores,
            self._logprobs({sample: chosen[sample] for sample in late - failed.keys()}, *logprobs) if logprobs else {},
            frozenset(late),
            failed,
            failed_exports,
        )

    def _logprobs(self, late: dict[int, int], of_tokens: Tensor, ids: Tensor, top: Tensor) -> dict[int, Logprobs]:
        """By sample."""
        assert self._sampled.logprobs is not None
        wanted = {
            sample: each.draw.logprobs
            for sample, each in enumerate(self._sequences)
            if each.draw is not None and each.draw.logprobs is not None
        }
        found: dict[int, Logprobs] = {}
        of_rows = zip(of_tokens.tolist(), ids.tolist(), top.tolist(), strict=True)
        for row, ((sample, count), (logprob, row_ids, row_top)) in enumerate(zip(wanted.items(), of_rows, strict=True)):
            if sample in late:
                logprob = self._sampled.logprobs.of_token(row, late[sample])
            pairs = zip(row_ids[:count], row_top[:count], strict=True)
            found[sample] = Logprobs(logprob, tuple(TokenLogprob(*pair) for pair in pairs))
        return found


def launched(
    sequences: list[SequenceStep],
    logits: Tensor,
    best: Tensor,
    last: Tensor,
    scores: list[tuple[ScoredToken, ...]],
    flush: Callable[[], frozenset[str]] | None = None,
) -> Launched:
    """logits [samples, vocab_size] fp32; best [samples]: `best_of` them; last [samples]: the token before each."""
    sampling = [sequence for sequence in sequences if sequence.samples]
    draws = {sample: each.draw for sample, each in enumerate(sampling) if each.draw is not None}
    sampled = sample_on_device(logits, best, draws, last) if draws else Sampled(best)
    of_host = np.flatnonzero([_is_for_host(each) for each in sampling])
    rows = logits[to_device(of_host, logits.device)] if len(of_host) else logits[:0]
    return Launched(sampling, sampled, rows, scores, flush)


def _is_for_host(sequence: SequenceStep) -> bool:
    return not sequence.greedy and sequence.draw is None


def _host_copy(tensor: Tensor) -> Tensor:
    """The tensor in host memory; from a GPU asynchronously."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
