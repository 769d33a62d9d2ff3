"""The cost of prefill, decode and KV transfer: the protocol that planner and simulator use, and a roofline model.

`RooflineCostModel` needs no measurement. A step takes the larger of its arithmetic and its memory time (Williams et
al., "Roofline", CACM 2009), each scaled by the share of the peak that real kernels reach. Measured models implement
the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem.errors import ConfigError


class PrefillWork(NamedTuple):
    """`tokens` prompt tokens that follow `context` tokens already in the KV cache."""

    tokens: int
    context: int


class CostModel(Protocol):
    """Time that one worker needs for its work, in seconds."""

    @property
    def fit_error(self) -> float | None:
        """Mean relative error against the measurements of the fit; None if the model is not fitted."""
        ...

    def prefill_s(self, tokens: int, context: int) -> float:
        """Time to compute `tokens` prompt tokens that follow `context` tokens already in the KV cache."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Time of a step that adds one token to each of `batch` requests with `context_tokens` tokens in all."""
        ...

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        """Time of an engine step that computes `prefills` and decodes for `batch` requests."""
        ...

    def transfer_s(self, num_bytes: int) -> float:
        """Time to move `num_bytes` of KV cache over one link."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole decoder-only transformer, before tensor parallelism.

    Args:
        block_params: parameters of all transformer blocks, each used once per token.
        head_params: parameters of the output projection, used for tokens to sample from.
        heads: query heads. kv_heads: key and value heads; grouped-query attention has fewer.
        weight_bytes, kv_bytes: bytes of one element.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_params: int
    head_params: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        _require_positive(self, "layers", "heads", "kv_heads", "head_dim", "block_params", "weight_bytes", "kv_bytes")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads: expected a multiple of kv_heads ({self.kv_heads}), got {self.heads}", field="heads"
            )

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of KV cache per token, all layers: 2·L·Hkv·dh·bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def weights_bytes(self) -> float:
        return (self.block_params + self.head_params) * self.weight_bytes


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """One rank's device: its dense peaks, and the shares of them that kernels reach (MFU and MBU)."""

    flops_per_s: float
    memory_bytes_per_s: float
    mfu: float = 1.0
    mbu: float = 1.0
    step_overhead_s: float = 0.0  # of every engine step

    def __post_init__(self) -> None:
        _require_positive(self, "flops_per_s", "memory_bytes_per_s")
        _require_share(self, "mfu", "mbu")
        if not self.step_overhead_s >= 0:
            raise ConfigError(
                f"step_overhead_s: expected at least 0, got {self.step_overhead_s:g}", field="step_overhead_s"
            )


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of a link. `efficiency`: the share of the line rate that transfers reach."""

    bytes_per_s: float
    latency_s: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "bytes_per_s")
        _require_share(self, "efficiency")
        if self.latency_s < 0:
            raise ConfigError(f"latency_s: expected at least 0, got {self.latency_s:g}", field="latency_s")


@dataclass(frozen=True, slots=True)
class RooflineCostModel:
    """A lower bound at `mfu` = `mbu` = 1; an estimate with measured shares. `tp` ranks share the work evenly and
    all-reduce their partial sums twice per layer over `fabric` (None: at no cost)."""

    model: ModelShape
    device: DeviceShape
    link: LinkShape
    tp: int = 1
    fabric: LinkShape | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "tp")

    @property
    def fit_error(self) -> None:
        """None: the model is not fitted."""
        return None

    def prefill_s(self, tokens: int, context: int) -> float:
        """max of (2·P·n + 2·L·Hq·dh·(n² + 2·n·c))/F and (weights + KV)/BW; lm_head on the last token only."""
        _require_count("tokens", tokens)
        _require_count("context", context)
        return self.step_s([PrefillWork(tokens, context)], 0, 0) if tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """max of (weights + s·kv)/BW and (2·P·B + 4·L·Hq·dh·s)/F, with s the context of the whole batch."""
        _require_count("batch", batch)
        _require_count("context_tokens", context_tokens)
        return self.step_s((), batch, context_tokens) if batch else 0.0

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        """Adds up the work of prefill and decode; the weights are read once."""
        model = self.model
        attention = 2.0 * model.layers * model.heads * model.head_dim
        flops = 2.0 * (model.block_params + model.head_params) * batch + 2.0 * attention * context_tokens
        kv_tokens, tokens = context_tokens, batch
        for count, context in prefills:
            flops += 2.0 * model.block_params * count + 2.0 * model.head_params
            flops += attention * (count * count + 2 * count * context)
            kv_tokens += context + count
            tokens += count
        moved = model.weights_bytes + kv_tokens * model.kv_token_bytes
        compute_s = flops / (self.device.mfu * self.device.flops_per_s * self.tp)
        memory_s = moved / (self.device.mbu * self.device.memory_bytes_per_s * self.tp)
        return max(compute_s, memory_s) + self._all_reduce_s(tokens) + self.device.step_overhead_s

    def transfer_s(self, num_bytes: int) -> float:
        """bytes/(eta·BW) + latency; 0 for 0 bytes."""
        _require_count("num_bytes", num_bytes)
        if num_bytes == 0:
            return 0.0
        return num_bytes / (self.link.efficiency * self.link.bytes_per_s) + self.link.latency_s

    def hiding_bytes_per_s(self, tokens: int) -> float:
        """The link rate at which a layer-wise transfer of `tokens` tokens takes as long as their prefill."""
        _require_count("tokens", tokens)
        seconds = self.prefill_s(tokens, 0)
        return tokens * self.model.kv_token_bytes / seconds if seconds else 0.0

    def _all_reduce_s(self, tokens: int) -> float:
        """Ring all-reduces of the hidden states: 2(t - 1)/t of them cross each rank's link (Patarasuk, Yuan 2009)."""
        if self.tp == 1 or self.fabric is None:
            return 0.0
        model = self.model
        crossing = 2 * (self.tp - 1) / self.tp * tokens * model.heads * model.head_dim * model.weight_bytes
        each_s = crossing / (self.fabric.efficiency * self.fabric.bytes_per_s) + self.fabric.latency_s
        return 2 * model.layers * each_s


@dataclass(frozen=True, slots=True)
class ConstrainedCostModel:
    """The steps of `base` with masks: a `share` of the rows that are sampled has a grammar, and each of them adds
    `mask_s_per_row`, the part of finding and applying its mask that the model's own work does not hide."""

    base: CostModel
    share: float
    mask_s_per_row: float

    def __post_init__(self) -> None:
        _require_share(self, "share")
        if not self.mask_s_per_row >= 0:
            raise ConfigError(
                f"mask_s_per_row: expected at least 0, got {self.mask_s_per_row:g}", field="mask_s_per_row"
            )

    @property
    def fit_error(self) -> float | None:
        return self.base.fit_error

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.step_s([PrefillWork(tokens, context)], 0, 0) if tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_s((), batch, context_tokens) if batch else 0.0

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        masks_s = self.share * (batch + len(prefills)) * self.mask_s_per_row
        return self.base.step_s(prefills, batch, context_tokens) + masks_s

    def transfer_s(self, num_bytes: int) -> float:
        return self.base.transfer_s(num_bytes)


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ConfigError(f"{name}: expected more than 0, got {value:g}", field=name)


def _require_share(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 < value <= 1:
            raise ConfigError(f"{name}: expected a share above 0 and at most 1, got {value:g}", field=name)


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{name}: expected at least 0, got {value}", field=name)
