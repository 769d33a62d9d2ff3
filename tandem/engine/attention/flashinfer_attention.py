"""Paged attention by FlashInfer (Ye et al. 2025, arXiv:2501.01005), whose plan divides a step's work by lengths.

The extra `tandem-serve[cuda]` installs it. It compiles its kernels with nvcc when a model first uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import flashinfer
import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.varlen_attention import StepRows
from tandem.engine.device.copies import to_device
from tandem.engine.device.events import DONE, DeviceEvent, record_event
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionParams

_WORKSPACE_BYTES: Final = 128 << 20  # what FlashInfer recommends; wrappers share it, as their calls are on one stream


@dataclass(frozen=True, slots=True)
class _Run:
    """The `PagedKernel` of a planned step, for each window."""

    wrappers: dict[int, Any]

    def __call__(
        self,
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
        by_head = key.transpose(1, 2), value.transpose(1, 2)  # as they are in the pool
        attended: Tensor = self.wrappers[window_size[0]].run(query, by_head)
        return attended


class FlashInferAttention:
    """A `PlannedKernel` for pools of the queries' dtype. One wrapper for each window: a plan is for one window."""

    def __init__(self, layout: KvPoolLayout, terms: AttentionParams, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._terms = terms
        self._dtype = dtype
        self._device = device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        lefts = {-1, *(window - 1 for window in terms.windows if window is not None)}  # keys before a query's own
        self._wrappers: dict[int, Any] = {
            left: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for left in lefts
        }
        self._planned: DeviceEvent = DONE

    def plan(self, rows: StepRows) -> _Run:
        """Waits until the device has read the last plan, which the wrappers keep in one host buffer each."""
        self._planned.synchronize()
        layout = self._layout
        blocks = -(-rows.lengths // layout.block_tokens)
        used = np.arange(rows.tables.shape[1]) < blocks[:, None]
        indices = to_device(rows.tables[used], self._device)
        block_starts = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32)
        for left, wrapper in self._wrappers.items():
            wrapper.plan(
                torch.from_numpy(rows.starts),
                torch.from_numpy(block_starts),
                indices,
                torch.from_numpy((rows.lengths - 1) % layout.block_tokens + 1),
                self._terms.heads,
                layout.kv_heads,
                layout.head_dim,
                layout.block_tokens,
                causal=True,
                sm_scale=self._terms.scale,
                window_left=left,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        self._planned = record_event(self._device)
        return _Run(self._wrappers)
