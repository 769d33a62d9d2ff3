"""The attention of one step, by the kernels that a rank has."""

from __future__ import annotations

from tandem.engine.attention.attention import StepAttention
from tandem.engine.attention.native_attention import NativeStepAttention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.attention.varlen_attention import PagedBatch, StepRows, VarlenAttention
from tandem.engine.kv_pool import KvPool
from tandem.engine.step import SequenceStep
from tandem.model.decoder import AttentionParams, StoringAttend
from tandem.native.library import Kernels


def attention_of(
    kernels: Kernels | None,
    paged: PagedPath | None,
    pool: KvPool,
    terms: AttentionParams,
    sequences: list[SequenceStep],
) -> StoringAttend:
    """By `paged`, else `kernels`, else torch over gathered blocks."""
    if paged is not None:
        rows = StepRows.of(sequences, pool.layout.block_tokens, pool.layout.num_blocks)
        batch = PagedBatch.of(rows, pool.tensor.device)
        return VarlenAttention(paged.of_step(rows), pool.tensor, batch, terms, paged.store)
    if kernels is None:
        return StepAttention(pool.tensor, pool.layout, sequences, terms)
    return NativeStepAttention(kernels, pool.tensor, pool.layout, sequences, terms)
