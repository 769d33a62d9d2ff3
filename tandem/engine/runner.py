"""One rank's half of a step: tensors in, logits out, finished layers told to the exporter."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engine.api import KvExporter
from tandem.engine.attention import StepAttention
from tandem.engine.decode_graphs import DecodeGraphs
from tandem.engine.kv_pool import KvPool
from tandem.engine.native_attention import NativeStepAttention
from tandem.engine.output import StepOutput, best_of_any, step_output
from tandem.engine.scores import score
from tandem.engine.step import SequenceStep, StepInput
from tandem.engine.varlen_attention import PagedBatch, PagedKernel, VarlenAttention, to_device
from tandem.model.decoder import Attend, Decoder
from tandem.native.library import Kernels


class ModelRunner:
    """Args: `paged` attends, else `kernels`, else torch over gathered blocks. `graphs` take the steps that they can."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        exporter: KvExporter,
        device: torch.device,
        kernels: Kernels | None = None,
        paged: PagedKernel | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._kernels = kernels
        self._paged = paged
        self.graphs = graphs
        self._model = model
        self._pool = pool
        self._exporter = exporter
        self._device = device

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        if step.exports:
            self._exporter.begin_step(step.exports)
        if not step.sequences:  # held requests are exported while nothing runs
            return StepOutput([], [], [])
        if self.graphs is not None and self.graphs.takes(step):
            return step_output(step.sequences, *self.graphs.run(step.sequences), [])
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
        hidden = self._model.hidden(
            to_device(np.array(token_ids, dtype=np.int64), self._device),
            to_device(np.array(positions, dtype=np.int64), self._device),
            self._attention(step.sequences),
            self._layer_done if step.exports else None,
        )
        logits = self._model.logits(hidden[to_device(np.array(rows, dtype=np.int64), self._device)])
        scores = [
            score(self._model.logits, hidden[first : first + len(sequence.scored)], sequence.scored, sequence.top)
            for sequence, first in scored
        ]
        return step_output(step.sequences, logits, best_of_any(logits), scores)

    def _attention(self, sequences: list[SequenceStep]) -> Attend:
        pool, terms = self._pool, self._model.attention
        if self._paged is not None:
            batch = PagedBatch.of(sequences, pool.layout.block_tokens, self._device)
            return VarlenAttention(self._paged, pool.tensor, batch, terms)
        if self._kernels is None:
            return StepAttention(pool.tensor, pool.layout, sequences, terms)
        return NativeStepAttention(self._kernels, pool.tensor, pool.layout, sequences, terms)

    def _layer_done(self, layer: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # launched is not yet written
        self._exporter.layer_done(layer)
