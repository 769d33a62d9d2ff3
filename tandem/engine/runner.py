"""One rank's half of a step: tensors in, logits out, finished layers told to the exporter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.engine.api import KvExporter, ScoredToken
from tandem.engine.attention import StepAttention
from tandem.engine.host_pool import HostPool
from tandem.engine.kv_pool import KvPool
from tandem.engine.native_attention import NativeStepAttention
from tandem.engine.scores import score
from tandem.engine.step import SequenceStep, StepInput
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Attend, Decoder
from tandem.native.library import Kernels
from tandem.scheduler.scheduler import ExportRange

TOLD_BYTES = 1 << 20  # of KV, before its layers are told of: to tell takes time from the step, and wakes the agent


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`logits` [samples, vocab_size], float32, on the CPU, in order of the sequences that sample; `scores` for each
    sequence with scored tokens, in their order."""

    logits: Tensor
    scores: list[tuple[ScoredToken, ...]]


class ModelRunner:
    """Args: `kernels` attend; None: torch does. `meet` returns when every rank of the worker has called it; None: there
    is one."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        exporter: KvExporter,
        device: torch.device,
        kernels: Kernels | None = None,
        host: HostPool | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._kernels = kernels
        self._host = host
        self._meet = meet
        self._model = model
        self._pool = pool
        self._exporter = exporter
        self._device = device

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """On the leader it returns when every rank has done the step's copies."""
        if step.copies is not None:
            assert self._host is not None  # copies come of a tier
            self._host.copy(step.copies)
            if self._meet is not None and not step.sequences:  # else the ranks meet in the model
                self._meet()
        if step.exports:
            self._exporter.begin_step(step.exports)
        if not step.sequences:  # held requests are exported while nothing runs
            return StepOutput(torch.empty(0, self._model.config.vocab_size), [])
        token_ids = [token for sequence in step.sequences for token in sequence.token_ids]
        positions = [s.start + offset for s in step.sequences for offset in range(len(s.token_ids))]
        rows: list[int] = []
        scored: list[tuple[SequenceStep, int]] = []
        end = 0
        for sequence in step.sequences:
            if sequence.scored:
                scored.append((sequence, end + sequence.scored_from))
            end += len(sequence.token_ids)
            if sequence.samples:
                rows.append(end - 1)
        told = layers_told(step.exports, self._pool.layout)
        hidden = self._model.hidden(
            torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            torch.tensor(positions, dtype=torch.int64, device=self._device),
            self._attention(step.sequences),
            partial(self._layer_done, told) if told else None,
        )
        logits = self._model.logits(hidden[torch.tensor(rows, dtype=torch.int64, device=self._device)])
        scores = [
            score(self._model.logits, hidden[first : first + len(sequence.scored)], sequence.scored, sequence.top)
            for sequence, first in scored
        ]
        return StepOutput(logits.cpu(), scores)

    def _attention(self, sequences: list[SequenceStep]) -> Attend:
        pool, terms = self._pool, self._model.attention
        if self._kernels is None:
            return StepAttention(pool.tensor, pool.layout, sequences, terms)
        return NativeStepAttention(self._kernels, pool.tensor, pool.layout, sequences, terms)

    def _layer_done(self, told: frozenset[int], layer: int) -> None:
        if layer not in told:
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # launched is not yet written
        self._exporter.layer_done(layer)


def layers_told(exports: Sequence[ExportRange], layout: KvPoolLayout) -> frozenset[int]:
    """The layers after which a step tells of what it wrote for handoffs."""
    blocks = max((len(each.block_ids) for each in exports if not each.in_cache), default=0)
    if not blocks:
        return frozenset()
    stride = -(-TOLD_BYTES // (blocks * layout.layer_bytes))
    return frozenset([*range(stride - 1, layout.layers, stride), layout.layers - 1])
