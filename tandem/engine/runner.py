"""One rank's part of a step: runs the model on it, and reports finished layers to the exporter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.engine.api import KvExporter
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.attention.step_attention import attention_of
from tandem.engine.decode_graphs import DecodeGraphs
from tandem.engine.device.copies import to_device
from tandem.engine.device.events import record_event
from tandem.engine.device.sampler import DrawRows
from tandem.engine.drafts.drafter import Computed, Drafter
from tandem.engine.host_pool import HostPool
from tandem.engine.kv_pool import KvPool
from tandem.engine.layer_reports import LayerReports
from tandem.engine.output import Launched, best_of_any, embedding_samples, launched
from tandem.engine.prompt_logprobs import score
from tandem.engine.step import Drafted, SequenceStep, StepInput
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Decoder, StoringAttend
from tandem.native.library import Kernels
from tandem.scheduler.plan import ExportRange

REPORT_BYTES = 1 << 20  # KV bytes between reports: each report wakes the agent


class ModelRunner:
    """Args: attention uses `paged`, else `kernels`, else torch over gathered blocks. `graphs` run the steps they
    accept. `barrier` waits for every rank of the worker; None: there is only one. `drafter`: for steps with drafts.
    `draw_rows`: as in `sample_on_device`."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        exporter: KvExporter,
        device: torch.device,
        kernels: Kernels | None = None,
        host: HostPool | None = None,
        barrier: Callable[[], None] | None = None,
        paged: PagedPath | None = None,
        graphs: DecodeGraphs | None = None,
        drafter: Drafter | None = None,
        draw_rows: DrawRows | None = None,
    ) -> None:
        self._kernels = kernels
        self._draw_rows = draw_rows
        self._host = host
        self._barrier = barrier
        self.drafter = drafter
        self.draft_seconds = 0.0  # that the last draft took
        self.samples_on_device = paged is not None  # on a GPU, where that costs less than copying the logits
        self.graphs = graphs
        self._last: Launched | None = None  # the last step run by graphs
        self._model = model
        self._pool = pool
        self._paged = paged
        on_gpu = device.type == "cuda"
        self._reports = LayerReports(exporter, partial(record_event, device, blocking=True) if on_gpu else None)
        self._device = device
        self.after_layer: Callable[[], None] | None = None  # called on this thread; not by graphs, which are quick

    def can_be_ahead_of(self, step: StepInput) -> bool:
        """Whether `launch` may run the step after `step`, with the same sequences, before `step` has ended."""
        chosen = (each.greedy or (each.draws and not each.masked) for each in step.sequences)
        return self.graphs is not None and all(chosen) and self.graphs.takes(step)

    @torch.inference_mode()
    def launch(self, step: StepInput, drafted: Callable[[list[Drafted]], None] | None = None) -> Launched | None:
        """Runs a step; None if it has no sequences. Returns on the leader after every rank has done the step's
        copies. `drafted` is called with the tokens that the step drafted, if it drafts any."""
        if step.copies is not None:
            assert self._host is not None  # only a host tier makes copies
            self._host.copy(step.copies)
            if self._barrier is not None and not step.sequences:  # else the model's collectives wait
                self._barrier()
        if step.exports:
            self._reports.begin_step(step.exports)
        if not step.sequences:  # held requests are exported in steps without sequences
            return None
        if self.graphs is not None and self.graphs.takes(step):
            before = self._last.tokens if step.ahead and self._last is not None else None
            logits, best, inputs = self.graphs.run(step.sequences, before)
            self._last = launched(step.sequences, logits, best, inputs, [], self._reports.flush, self._draw_rows)
            return self._last
        sequences = self._drafted(step.sequences, drafted)
        token_ids = [token for sequence in sequences for token in sequence.token_ids]
        positions = [s.start + offset for s in sequences for offset in range(len(s.token_ids))]
        rows: list[int] = []
        scored: list[tuple[SequenceStep, int]] = []
        end = 0
        for sequence in sequences:
            if sequence.scored:
                scored.append((sequence, end + sequence.scored_from))
            end += len(sequence.token_ids)
            rows += range(end - sequence.samples, end)
        reported = layers_to_report(step.exports, self._pool.layout)
        inputs, where, sampled = (
            to_device(np.array(each, dtype=np.int64), self._device) for each in (token_ids, positions, rows)
        )
        attend, drafter = self.attention_over(self._pool, sequences), self.drafter
        tapped: dict[int, Tensor] = {}
        hidden = self._model.hidden(
            inputs,
            where,
            attend,
            partial(self._layer_done, reported),
            rows=None if scored else sampled,
            entered=None if drafter is None or not drafter.taps else tapped.__setitem__,
        )
        hidden_of_samples = hidden[sampled] if scored else hidden
        if drafter is not None:
            drafter.keep(Computed(sequences, inputs, where, hidden_of_samples, tapped, attend))
        for layer in range(len(self._model.layers), self._pool.layout.layers):  # a drafter's, even if it failed
            self._layer_done(reported, layer)
        logits = self._model.logits(hidden_of_samples)
        scores = [
            score(self._model.logits, hidden[first : first + len(sequence.scored)], sequence.scored, sequence.top)
            for sequence, first in scored
        ]
        best = best_of_any(logits, self._kernels)
        embedded = None
        if any(each.embeds for each in sequences):
            of_samples = [each for each in sequences for _ in range(each.samples)]
            embedded = self._model.normed(hidden_of_samples[embedding_samples(of_samples)])
        return launched(
            sequences, logits, best, inputs[sampled], scores, self._reports.flush, self._draw_rows, embedded
        )

    def attention_over(self, pool: KvPool, sequences: list[SequenceStep]) -> StoringAttend:
        return attention_of(self._kernels, self._paged, pool, self._model.attention, sequences)

    def _drafted(
        self, sequences: list[SequenceStep], told: Callable[[list[Drafted]], None] | None
    ) -> list[SequenceStep]:
        """The sequences with the tokens that they draft, and their branches."""
        if self.drafter is None or all(each.draft is None for each in sequences):
            return sequences
        began_s = time.perf_counter()
        self.drafter.after_layer = self.after_layer
        drafted = self.drafter.draft(sequences)
        self.draft_seconds = time.perf_counter() - began_s
        if told is not None:
            told(drafted)
        branches = [branch for each in sequences if each.draft for branch in each.draft.branches]
        self._pool.copy_blocks([each.copied for each in branches if each.copied])
        return [step for each, found in zip(sequences, drafted, strict=True) for step in each.with_drafted(found)]

    def _layer_done(self, reported: frozenset[int], layer: int) -> None:
        if layer in reported:
            self._reports.layer_done(layer)
        if self.after_layer is not None:
            self.after_layer()


def layers_to_report(exports: Sequence[ExportRange], layout: KvPoolLayout) -> frozenset[int]:
    """The layers after which a step reports its writes for handoffs."""
    blocks = max((len(each.block_ids) for each in exports if not each.in_cache), default=0)
    if not blocks:
        return frozenset()
    stride = -(-REPORT_BYTES // (blocks * layout.layer_bytes))
    return frozenset([*range(stride - 1, layout.layers, stride), layout.layers - 1])
