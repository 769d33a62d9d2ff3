"""One rank's half of a step: tensors in, logits out, finished layers told to the exporter."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.api import KvExporter
from tandem.engine.attention import StepAttention
from tandem.engine.kv_pool import KvPool
from tandem.engine.step import StepInput
from tandem.model.llama import LlamaModel


class ModelRunner:
    def __init__(self, model: LlamaModel, pool: KvPool, exporter: KvExporter, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._exporter = exporter
        self._device = device
        self._heads = model.layers[0].attention.heads

    @torch.inference_mode()
    def execute(self, step: StepInput) -> Tensor:
        """Runs the step. Returns logits [samples, vocab_size], float32, on the CPU, in order of the sequences that
        sample."""
        if step.exports:
            self._exporter.begin_step(step.exports)
        token_ids = [token for sequence in step.sequences for token in sequence.token_ids]
        positions = [s.start + offset for s in step.sequences for offset in range(len(s.token_ids))]
        rows: list[int] = []
        end = 0
        for sequence in step.sequences:
            end += len(sequence.token_ids)
            if sequence.samples:
                rows.append(end - 1)
        logits = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            torch.tensor(positions, dtype=torch.int64, device=self._device),
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            StepAttention(self._pool.tensor, self._pool.layout, step.sequences, self._heads),
            self._layer_done if step.exports else None,
        )
        return logits.cpu()

    def _layer_done(self, layer: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # launched is not yet written
        self._exporter.layer_done(layer)
