"""Records decode steps and replays them, because launching hundreds of operations takes longer than a small step.

A recording has fixed shapes and addresses. There is one for each of a few batch sizes, over permanent tensors, and a
step uses the next larger size. Empty slots hold a sequence of one token in the pool's spare block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.varlen_attention import PagedBatch, PagedKernel, StoreKv, VarlenAttention
from tandem.engine.block_tables import check_blocks
from tandem.engine.device.events import DONE, record_event
from tandem.engine.device.graph_recorder import GraphRecorder
from tandem.engine.output import best_of
from tandem.engine.step import SequenceStep, StepInput
from tandem.kvcache.layout import blocks_for
from tandem.model.decoder import Decoder


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8 and then steps of 8, so that few slots are empty. The last size fits `most`."""
    sizes = [1, 2, 4, *range(8, most + 8, 8)]
    return [size for size, smaller in zip(sizes, [0, *sizes], strict=False) if smaller < most]


class DecodeGraphs:
    """Args: `pool` with its spare block at the end; `most_requests` per step; `most_tokens` per request."""

    def __init__(
        self,
        model: Decoder,
        pool: Tensor,
        kernel: PagedKernel,
        recorder: GraphRecorder,
        store: StoreKv,
        *,
        most_requests: int,
        most_tokens: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._kernel = kernel
        self._recorder = recorder
        self._store = store
        self._sizes = batch_sizes(most_requests)
        self._inputs = _Inputs(pool, self._sizes[-1], most_tokens)
        self._logits = torch.empty(self._sizes[-1], model.config.vocab_size, dtype=torch.float32, device=pool.device)
        self._best = torch.empty(self._sizes[-1], dtype=torch.int64, device=pool.device)
        self.replays: dict[int, Callable[[], None]] = {}

    def takes(self, step: StepInput) -> bool:
        """Whether the step only decodes and needs nothing but logits."""
        return (
            not step.exports
            and len(step.sequences) <= self._sizes[-1]
            and all(_is_plain(each) for each in step.sequences)
        )

    def run(self, sequences: list[SequenceStep], tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [sequences, vocab_size], `best_of` them and the input tokens, valid until the next run.
        `tokens` [sequences] int64, on the device, replace those of `sequences`."""
        count = len(sequences)
        size = next(each for each in self._sizes if each >= count)
        self._inputs.write(sequences, size)
        if tokens is not None:
            self._inputs.tokens[:count] = tokens.clamp_min(0)  # negative: the output is discarded
        if size not in self.replays:
            self.replays[size] = self._recorder.record(partial(self._decode, size))
        self.replays[size]()
        return self._logits[:count], self._best[:count], self._inputs.tokens[:count]

    @torch.inference_mode()
    def record_all(self) -> None:
        """Records all sizes, so that no request waits for it. The largest is first, so the others fit into its
        memory."""
        for size in reversed(self._sizes):
            self._inputs.write([], size)
            self.replays[size] = self._recorder.record(partial(self._decode, size))

    def _decode(self, size: int) -> None:
        inputs = self._inputs
        attend = VarlenAttention(self._kernel, self._pool, inputs.batch(size), self._model.attention, self._store)
        hidden = self._model.hidden(inputs.tokens[:size], inputs.positions[:size], attend)
        logits = self._logits[:size].copy_(self._model.logits(hidden))
        self._best[:size] = best_of(logits)


class _Inputs:
    """The recordings' input tensors. They are written on the host, to two buffers in turn, and copied from there."""

    def __init__(self, pool: Tensor, slots: int, most_tokens: int) -> None:
        self._block_tokens = pool.shape[4]
        self._spare = pool.shape[0] - 1
        self._most_tokens = most_tokens
        width = blocks_for(most_tokens, self._block_tokens)
        on_gpu = pool.device.type == "cuda"
        self._now, self._other = (_HostInputs(slots, width, self._spare, pinned=on_gpu) for _ in range(2))
        self._words, self._lengths, self._tables = (
            each.to(pool.device, copy=True) for each in (self._now.words, self._now.lengths, self._now.tables)
        )
        self.tokens, self.positions, self._blocks, self._offsets = self._words
        self._starts = torch.arange(slots + 1, dtype=torch.int32, device=pool.device)
        self._rows: list[list[int]] = [[] for _ in range(slots)]  # leading entries of `_tables` by slot

    def batch(self, size: int) -> PagedBatch:
        return PagedBatch(
            self._tables[:size],
            self._lengths[:size],
            self._starts[: size + 1],
            self._blocks[:size],
            self._offsets[:size],
            most_queries=1,
            most_keys=self._most_tokens,
        )

    def write(self, sequences: list[SequenceStep], size: int) -> None:
        """Writes the last token of each of `sequences` to the first slots, and empty slots up to `size`."""
        self._now, self._other = self._other, self._now
        count, host = len(sequences), self._now
        host.copied.synchronize()
        words, lengths = host.words.numpy(), host.lengths.numpy()
        starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
        words[0, :count] = [sequence.token_ids[0] for sequence in sequences]
        words[1, :count] = starts
        words[2, :count] = [sequence.blocks[-1] for sequence in sequences]
        words[3, :count] = starts % self._block_tokens
        words[:, count:size] = np.array([[0], [0], [self._spare], [0]])
        lengths[:count], lengths[count:size] = starts + 1, 1
        self._words.copy_(host.words, non_blocking=True)
        self._lengths.copy_(host.lengths, non_blocking=True)
        self._write_tables([*(sequence.blocks for sequence in sequences), *[[self._spare]] * (size - count)])
        host.copied = record_event(self._words.device)

    def _write_tables(self, rows: list[list[int]]) -> None:
        """Copies the rows that changed, and those between them: entries after a row's last block are never read."""
        changed = [slot for slot, row in enumerate(rows) if row != self._rows[slot]]
        if not changed:
            return
        span = slice(changed[0], changed[-1] + 1)
        for slot in range(span.start, span.stop):
            self._now.write_row(slot, rows[slot])
        self._tables[span].copy_(self._now.tables[span], non_blocking=True)
        self._rows[span] = rows[span]


class _HostInputs:
    """One of the two host buffers. `copied`: the device has read it."""

    def __init__(self, slots: int, width: int, spare: int, *, pinned: bool) -> None:
        self.words = torch.zeros(4, slots, dtype=torch.int64, pin_memory=pinned)
        self.lengths = torch.ones(slots, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.full((slots, width), spare, dtype=torch.int32, pin_memory=pinned)
        self.copied = DONE
        self._rows: list[list[int]] = [[] for _ in range(slots)]  # leading entries of `tables` by slot
        self._num_blocks = spare + 1

    def write_row(self, slot: int, blocks: list[int]) -> None:
        if self._rows[slot] != blocks:
            self.tables.numpy()[slot, : len(blocks)] = blocks
            check_blocks(self.tables.numpy()[slot, : len(blocks)], self._num_blocks)
            self._rows[slot] = blocks


def _is_plain(sequence: SequenceStep) -> bool:
    needs_more = sequence.scored or sequence.draft is not None or sequence.embeds
    return bool(sequence.samples) and len(sequence.token_ids) == 1 and not needs_more
