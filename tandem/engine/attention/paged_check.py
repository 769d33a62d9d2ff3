"""Checks a paged kernel against a reference on this machine, because a wrong result is worse than none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.varlen_attention import (
    PagedKernel,
    PlannedKernel,
    StepRows,
    StoreKv,
    kernel_of_step,
    store_by_torch,
)
from tandem.engine.kv_pool import DTYPES
from tandem.kvcache.layout import KvPoolLayout, blocks_for
from tandem.model.decoder import AttentionParams
from tandem.model.fp8 import FP8, to_fp8

# (queries, keys) of each sequence: decode steps with few and many sequences and keys for every split, and chunks.
BATCHES: Final = ([(1, 1500)], [(1, 1 + 75 * n) for n in range(12)], [(1, 9), (70, 70), (40, 150), (1, 1), (129, 200)])
_TOLERANCE: Final = 0.05  # of a head's answer; rounding in half precision makes less than half of it


def kernel_error(
    kernel: PagedKernel | PlannedKernel,
    layout: KvPoolLayout,
    terms: AttentionParams,
    dtype: torch.dtype,
    device: torch.device,
    batches: Sequence[list[tuple[int, int]]] = BATCHES,
) -> str | None:
    """The error of `kernel` for queries of `dtype` over pools of this layout, which are fp8 or of the same dtype; None
    if it is correct."""
    try:
        differences = [
            _difference(kernel, layout, terms, window, batch, dtype, device)
            for window in {None, *terms.windows}
            for batch in batches
        ]
        worst = float(torch.stack(differences).max())  # waits for the device; NaN if any is
    except Exception as error:  # not available: no compiler, too little memory, or an old driver
        return f"{type(error).__name__}: {error}"
    return None if worst < _TOLERANCE else f"its results differ from the reference by {worst:.3g} of their norm"


def _difference(
    kernel: PagedKernel | PlannedKernel,
    layout: KvPoolLayout,
    terms: AttentionParams,
    window: int | None,
    batch: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The largest relative difference of a token's head."""
    generator = torch.Generator(device).manual_seed(0)
    page, width = layout.block_tokens, max(blocks_for(keys, layout.block_tokens) for _, keys in batch)
    shape = (len(batch) * width, 2, layout.kv_heads, page, layout.head_dim)
    pool = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    tables = torch.randperm(shape[0], generator=generator, device=device, dtype=torch.int32).view(len(batch), width)
    lengths = torch.tensor([keys for _, keys in batch], dtype=torch.int32, device=device)
    # What a sequence's last block held before is undefined, and must not matter.
    beyond = torch.arange(width * page, device=device).view(width, page) >= lengths[:, None, None]
    by_cell = pool.transpose(2, 3)  # [blocks, 2, block_tokens, kv_heads, head_dim]
    by_cell[tables.long()] = by_cell[tables.long()].masked_fill(beyond[:, :, None, :, None, None], torch.nan)
    if DTYPES[layout.dtype] == FP8:
        pool = to_fp8(pool)
    counts = [queries for queries, _ in batch]
    query = torch.randn(sum(counts), terms.heads, layout.head_dim, generator=generator, device=device, dtype=dtype)
    starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    nothing = np.zeros(0, dtype=np.int64)  # the cells of the step's own tokens hold their keys already
    rows = StepRows(tables.cpu().numpy(), lengths.cpu().numpy(), starts.cpu().numpy(), nothing, nothing)

    def answer(by: PagedKernel) -> Tensor:
        return by(
            query, pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2), starts, None,
            max(counts), width * page, scale=terms.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True, seqused_k=lengths, block_table=tables,
        ).float()  # fmt: skip

    right = answer(plain_attention)
    worst: Tensor = ((answer(kernel_of_step(kernel, rows)) - right).norm(dim=-1) / right.norm(dim=-1)).max()
    return worst


def store_error(store: StoreKv, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """The error of `store` for keys and values of `dtype`, NaN among them; None if it writes what torch does."""
    generator = torch.Generator(device).manual_seed(0)
    heads, dim, page, tokens = layout.kv_heads, layout.head_dim, layout.block_tokens, 9
    rows = torch.randn(tokens, 3, heads, dim, generator=generator, device=device, dtype=dtype) * 300
    rows[3, :, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=device)
    cells = torch.randperm(4 * page, generator=generator, device=device)[:tokens]
    found = []
    try:
        for each in (store, store_by_torch):
            pool = torch.zeros(4, 2, heads, page, dim, device=device, dtype=DTYPES[layout.dtype])
            each(pool[:, 0], pool[:, 1], rows[:, 1], rows[:, 2], cells // page, cells % page)
            found.append(pool.float().nan_to_num(nan=1e6))
        same = torch.equal(*found)
    except Exception as error:  # as in `kernel_error`
        return f"{type(error).__name__}: {error}"
    return None if same else "it writes other values"


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """A `PagedKernel` for any device, in fp32 over copies of all blocks of all tokens. Its operations do not depend on
    tensor values, so it can be recorded."""
    left, right = window_size
    assert right == 0
    assert {each.dtype for each in (block_table, seqused_k, cu_seq_q)} == {torch.int32}
    tokens, heads, head_dim = query.shape
    number = torch.arange(tokens, device=query.device)
    own = torch.searchsorted(cu_seq_q, number, right=True) - 1
    position = seqused_k[own] - (cu_seq_q[own + 1] - number)
    keys, values = (each[block_table[own].long()].flatten(1, 2).float() for each in (key, value))
    grouped = query.float().view(tokens, key.shape[2], -1, head_dim)
    back = position[:, None] - torch.arange(keys.shape[1], device=query.device)
    unseen = (back < 0) if left < 0 else (back < 0) | (back > left)
    scores = torch.einsum("tkgd,tskd->tkgs", grouped, keys) * (scale or head_dim**-0.5)
    weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(dim=-1)
    values = values.masked_fill(unseen[:, :, None, None], 0)  # 0 times NaN is NaN
    return torch.einsum("tkgs,tskd->tkgd", weights, values).view(tokens, heads, head_dim).to(query.dtype)
