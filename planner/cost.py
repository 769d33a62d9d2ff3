"""The cost of prefill, decode and KV transfer: the protocol that planner and simulator use, and a roofline model.

`RooflineCostModel` needs no measurement. A step takes the larger of its arithmetic and its memory time (Williams et
al., "Roofline", CACM 2009), each scaled by the share of the peak that real kernels reach. Measured models implement
the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from planner.shapes import DeviceShape, LinkShape, ModelShape, require_positive, require_share
from tandem.errors import ConfigError


class PrefillWork(NamedTuple):
    """`tokens` prompt tokens that follow `context` tokens already in the KV cache."""

    tokens: int
    context: int


class StepLoad(NamedTuple):
    """What the ranks of a worker compute and move in a step, together: FLOPs of products with weights and of attention,
    and of experts; `moved_bytes` of weights and KV, and those of experts."""

    products: float
    attention: float
    moved_bytes: float
    expert_flops: float
    expert_bytes: float


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
        """Time to move `num_bytes` of KV cache over the link of one rank."""
        ...


LEAST_CHUNK = 16  # tokens of a prompt in a step; it is never cut smaller


def largest_chunk(
    cost: CostModel, most: int, start: int, batch: int, context_tokens: int, longest_s: float
) -> tuple[int, float]:
    """Halves a chunk of a prompt, from `most` tokens after the first `start`, until its step, in which `batch` requests
    decode too, takes at most `longest_s`. Returns its tokens and the time of the step; (0, 0.0): none is so short."""
    chunk = most
    while chunk >= LEAST_CHUNK:
        step_s = cost.step_s([PrefillWork(chunk, start)], batch, context_tokens)
        if step_s <= longest_s:
            return chunk, step_s
        chunk //= 2
    return 0, 0.0


@dataclass(frozen=True, slots=True)
class RooflineCostModel:
    """A lower bound at `mfu` = `mbu` = 1; an estimate with measured shares. `tp` ranks share the work evenly and
    all-reduce their partial sums twice per layer over `fabric` (None: at no cost). `link`: of each rank to other
    workers."""

    model: ModelShape
    device: DeviceShape
    link: LinkShape
    tp: int = 1
    fabric: LinkShape | None = None

    def __post_init__(self) -> None:
        require_positive(self, "tp")

    @property
    def fit_error(self) -> None:
        """None: the model is not fitted."""
        return None

    def prefill_s(self, tokens: int, context: int) -> float:
        """max of 2·P·n/Fw + 2·L·Hq·dh·(n² + 2·n·c)/F and (weights + KV)/BW; lm_head on the last token only."""
        _require_count("tokens", tokens)
        _require_count("context", context)
        return self.step_s([PrefillWork(tokens, context)], 0, 0) if tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """max of (weights + s·kv)/BW and 2·P·B/Fw + 4·L·Hq·dh·s/F, with s the context of the whole batch."""
        _require_count("batch", batch)
        _require_count("context_tokens", context_tokens)
        return self.step_s((), batch, context_tokens) if batch else 0.0

    def work(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> StepLoad:
        """Of prefill and decode together; the weights are read once."""
        tokens, _, products, attention, moved = self._dense(prefills, batch, context_tokens)
        if (experts := self.model.experts) is None:
            return StepLoad(products, attention, moved, 0.0, 0.0)
        return StepLoad(products, attention, moved, experts.flops(tokens), experts.read_bytes(tokens))

    def _dense(
        self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int
    ) -> tuple[int, int, float, float, float]:
        """Tokens, rows to sample from, FLOPs of products and of attention, bytes moved, but for experts. A plain tuple:
        a simulation asks for each step."""
        model = self.model
        seen, tokens = model.seen_tokens(context_tokens, batch), batch
        attention = model.decode_flops(seen)
        for count, context in prefills:
            attention += model.prefill_flops(count, context)
            seen += model.seen_tokens(context, 1) + count * model.layers
            tokens += count
        rows = batch + len(prefills)
        # Ranks beyond the KV heads hold copies of them.
        moved = model.weights_bytes + seen * model.kv_token_bytes / model.layers * max(1.0, self.tp / model.kv_heads)
        return tokens, rows, 2.0 * (model.block_params * tokens + model.head_params * rows), attention, moved

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        model, device = self.model, self.device
        tokens, rows, products, attention, moved = self._dense(prefills, batch, context_tokens)
        peak_s = products / (device.weight_flops_per_s or device.flops_per_s) + attention / device.flops_per_s
        overhead_s = device.step_overhead_s + model.layers * device.layer_overhead_s + rows * device.row_overhead_s
        if (experts := model.experts) is not None:
            peak = device.expert_efficiency * (device.expert_flops_per_s or device.flops_per_s)
            peak_s += experts.flops(tokens) / peak
            moved += experts.read_bytes(tokens) / device.expert_efficiency
            overhead_s += experts.layers * device.expert_overhead_s
        compute_s = peak_s / (device.mfu * self.tp)
        memory_s = moved / (device.mbu * device.memory_bytes_per_s * self.tp)
        return max(compute_s, memory_s) + self._all_reduce_s(tokens) + overhead_s

    def transfer_s(self, num_bytes: int) -> float:
        """bytes/(eta·BW) + latency; 0 for 0 bytes."""
        _require_count("num_bytes", num_bytes)
        if num_bytes == 0:
            return 0.0
        return num_bytes / (self.link.efficiency * self.link.bytes_per_s) + self.link.latency_s

    def _all_reduce_s(self, tokens: int) -> float:
        """Ring all-reduces of the hidden states: 2(t - 1)/t of them cross each rank's link (Patarasuk, Yuan 2009)."""
        if self.tp == 1 or self.fabric is None:
            return 0.0
        model = self.model
        hidden = model.hidden or model.heads * model.head_dim
        crossing = 2 * (self.tp - 1) / self.tp * tokens * hidden * model.activation_bytes
        each_s = crossing / (self.fabric.efficiency * self.fabric.bytes_per_s) + self.fabric.latency_s
        return 2 * model.layers * each_s


@dataclass(frozen=True, slots=True)
class _OtherSteps:
    """A cost model whose steps take other times than those of `base`."""

    base: CostModel

    @property
    def fit_error(self) -> float | None:
        return self.base.fit_error

    def transfer_s(self, num_bytes: int) -> float:
        return self.base.transfer_s(num_bytes)


@dataclass(frozen=True, slots=True)
class ConstrainedCostModel(_OtherSteps):
    """The steps of `base` with masks: a `share` of the rows that are sampled has a grammar, and each of them adds
    `mask_s_per_row`, the part of finding and applying its mask that the model's own work does not hide."""

    share: float
    mask_s_per_row: float

    def __post_init__(self) -> None:
        require_share(self, "share")
        if not self.mask_s_per_row >= 0:
            raise ConfigError(
                f"mask_s_per_row: expected at least 0, got {self.mask_s_per_row:g}", field="mask_s_per_row"
            )

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.step_s([PrefillWork(tokens, context)], 0, 0) if tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_s((), batch, context_tokens) if batch else 0.0

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        masks_s = self.share * (batch + len(prefills)) * self.mask_s_per_row
        return self.base.step_s(prefills, batch, context_tokens) + masks_s


@dataclass(frozen=True, slots=True)
class StretchedCostModel(_OtherSteps):
    """Steps that take `factor` times as long; transfers as `base` says."""

    factor: float

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.factor * self.base.prefill_s(tokens, context)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.factor * self.base.decode_step_s(batch, context_tokens)

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        return self.factor * self.base.step_s(prefills, batch, context_tokens)


@dataclass(frozen=True, slots=True)
class Corrections:
    """What a running cluster takes instead of what a cost model says: factors on the time of steps, and seconds before
    a request's first token in which no worker computes for it (the router's and the worker's handling, the network)."""

    prefill: float = 1.0
    decode: float = 1.0
    fixed_s: float = 0.0

    def of(self, base: CostModel) -> CostModel:
        return base if self.prefill == self.decode == 1.0 else CorrectedCostModel(base, self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class CorrectedCostModel(_OtherSteps):
    """The steps of `base`, of which the decoding of a batch takes `decode` times as long, and what prompts add to it
    `prefill` times. No step is shorter than its prompts alone, on which the search's bounds rely."""

    prefill: float
    decode: float

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.prefill * self.base.prefill_s(tokens, context)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.decode * self.base.decode_step_s(batch, context_tokens)

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        decode_s = self.base.step_s((), batch, context_tokens) if batch else 0.0
        if not prefills:
            return self.decode * decode_s
        prompts_s = self.base.step_s(prefills, 0, 0)
        if not batch:
            return self.prefill * prompts_s
        added_s = max(0.0, self.base.step_s(prefills, batch, context_tokens) - decode_s)
        return max(self.decode * decode_s + self.prefill * added_s, self.prefill * prompts_s)


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{name}: expected at least 0, got {value}", field=name)
