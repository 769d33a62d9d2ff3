"""vLLM's side of our data plane: its KV cache in our pool, and each layer reported to the transfer agent when it is
saved.

vLLM makes two of these, one for its scheduler and one for its worker. Both find what is Tandem's in the connector's
extra settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.model_executor.models.utils import extract_layer_index

from tandem.engine.api import KvExporter
from tandem.engine.kv_pool import DTYPES, KvPool
from tandem.engine.runner import layers_to_report
from tandem.errors import ConfigError, InternalError
from tandem.kvcache.layout import KvPoolLayout, blocks_for
from tandem.scheduler.plan import ExportRange
from tandem.vllm_engine.exports import Export

SHARED = "tandem"  # the key of the extra settings
_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "float8_e4m3"}  # as vLLM keeps fp8


@dataclass(slots=True)
class Shared:
    """What a rank and vLLM's connectors in its process share."""

    exporter: KvExporter
    pool: KvPool | None = None  # once vLLM has made its KV cache
    after_layer: Callable[[], None] | None = None
    exports: dict[str, Export] = field(default_factory=dict)  # by request id, until their blocks are released

    def report_layer(self) -> None:
        if self.after_layer is not None:
            self.after_layer()


@dataclass(slots=True)
class StepExports(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to each rank, with a step."""

    ranges: tuple[ExportRange, ...]


class TandemConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        if kinds != ["FullAttentionSpec"]:
            raise ConfigError(f"engine.kind: expected full attention in each layer, got {', '.join(kinds) or 'none'}")
        self._shared: Shared = self._kv_transfer_config.kv_connector_extra_config[SHARED]
        self._layers: dict[str, int] = {}
        self._reported: frozenset[int] = frozenset()

    # --- the scheduler's

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # imports are reserved (tandem/vllm_engine/scheduler.py)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> StepExports:
        ranges: list[ExportRange] = []
        if any(request_id in self._shared.exports for request_id in scheduler_output.num_scheduled_tokens):
            ranges = self._ranges(scheduler_output)
        return StepExports(tuple(ranges))

    def _ranges(self, scheduler_output: Any) -> list[ExportRange]:
        if self._shared.pool is None:
            raise InternalError("vLLM planned a step before it had a KV cache")
        layout = self._shared.pool.layout
        starts = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
        again = scheduler_output.scheduled_cached_reqs
        starts.update(zip(again.req_ids, again.num_computed_tokens, strict=True))
        chunks = []
        written: set[int] = set()
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            (blocks,) = self._kv_cache_manager.get_block_ids(request_id)
            start = starts[request_id]
            written.update(blocks[start // layout.block_tokens : blocks_for(start + count, layout.block_tokens)])
            if (export := self._shared.exports.get(request_id)) is not None:
                chunks.append((export, start, count, blocks))
        return [
            each
            for export, start, count, blocks in chunks
            for each in export.ranges(start, count, blocks, layout, written)
        ]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return request.request_id in self._shared.exports, None  # True: keeps its blocks

    # --- a rank's

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Moves vLLM's KV cache into our pool, before anything is in it."""
        names = sorted(kv_caches, key=extract_layer_index)
        self._layers = {name: layer for layer, name in enumerate(names)}
        caches = [kv_caches[name] for name in names]
        pool = KvPool(_layout(caches), caches[0].device)
        for layer, cache in enumerate(caches):
            target = pool.tensor[:, layer, 0]  # [block, head, token, 2 * head_dim]
            cache.set_(target.untyped_storage(), target.storage_offset(), target.shape, target.stride())
        self._shared.pool = pool

    def bind_connector_metadata(self, connector_metadata: StepExports) -> None:
        super().bind_connector_metadata(connector_metadata)
        ranges = connector_metadata.ranges
        self._reported = frozenset()
        if ranges and self._shared.pool is not None:
            self._reported = layers_to_report(ranges, self._shared.pool.layout)
            self._shared.exporter.begin_step(ranges)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        layer = self._layers[layer_name]
        if layer in self._reported:
            self._shared.exporter.layer_done(layer)
        self._shared.report_layer()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # transfer agents write to the pool

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def _layout(caches: Sequence[Tensor]) -> KvPoolLayout:
    """Raises ConfigError for what our protocol cannot exchange, by name."""
    first = caches[0]
    shapes = {tuple(cache.shape) for cache in caches}
    if len({cache.data_ptr() for cache in caches}) < len(caches):
        raise ConfigError(
            "engine.kind: expected a model whose layers each have KV of their own, got some that share it"
        )
    if len(shapes) > 1:
        raise ConfigError(f"engine.kind: expected a model whose layers have KV of one shape, got {sorted(shapes)}")
    if first.dim() != 4 or first.dtype not in _NAMES:
        raise ConfigError(
            "engine.kind: expected a KV cache of [block, head, token, K and V] in float32, bfloat16, float16 or fp8, "
            f"got {list(first.shape)} in {str(first.dtype).removeprefix('torch.')}"
        )
    blocks, heads, tokens, width = first.shape
    packed = first.device.type == "cpu"  # keys of 32 tokens are turned around for vector instructions
    return KvPoolLayout(blocks, len(caches), heads, tokens, width, _NAMES[first.dtype], joined=True, packed=packed)
