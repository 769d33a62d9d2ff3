"""What a decoder-only transformer computes, reads and keeps for each token, by its sizes alone. A device's and a link's
peaks. All before tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.step_work import chosen_experts
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts in so many layers: in each, a token chooses `per_token` of `count`. `params`: of one expert
    of a layer. `weight_bytes`: of one of its elements."""

    layers: int
    count: int
    per_token: int
    params: int
    weight_bytes: float = 2.0

    def __post_init__(self) -> None:
        require_positive(self, "layers", "count", "per_token", "params", "weight_bytes")
        if self.per_token > self.count:
            raise ConfigError(f"per_token: expected at most {self.count}, got {self.per_token}", field="per_token")

    @property
    def all_params(self) -> int:
        return self.layers * self.count * self.params

    def flops(self, tokens: int) -> float:
        return 2.0 * self.layers * self.per_token * self.params * tokens

    def read_bytes(self, tokens: int) -> float:
        """Of the experts that the tokens choose together."""
        return self.layers * chosen_experts(self.count, self.per_token, tokens) * self.params * self.weight_bytes


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, 2024): the cache keeps one latent of `rank` elements and `rope` rotated
    ones for each token and layer. A prompt's latents are expanded to keys and values of `key_dim` and `value_dim` for
    each head; a decode step multiplies with the latents themselves."""

    rank: int
    rope: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        require_positive(self, "rank", "rope", "key_dim", "value_dim")


@dataclass(frozen=True, slots=True)
class WindowShape:
    """So many layers attend to the last `tokens` only, the token itself included."""

    layers: int
    tokens: int

    def __post_init__(self) -> None:
        require_positive(self, "layers", "tokens")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole decoder-only transformer.

    Args:
        block_params: parameters of all transformer blocks that each token uses: all but those of `experts`.
        head_params: parameters of the output projection, used for tokens to sample from.
        heads: query heads. kv_heads: key and value heads; grouped-query attention has fewer, a latent counts as one.
        hidden: elements of a token's hidden state; None: heads·head_dim.
        weight_bytes, kv_bytes, activation_bytes: bytes of one element.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_params: int
    head_params: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    activation_bytes: float = 2.0
    hidden: int | None = None
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    window: WindowShape | None = None

    def __post_init__(self) -> None:
        require_positive(self, "layers", "heads", "kv_heads", "head_dim", "block_params", "weight_bytes", "kv_bytes")
        require_positive(self, "activation_bytes")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads: expected a multiple of kv_heads ({self.kv_heads}), got {self.heads}", field="heads"
            )
        if self.window is not None and self.window.layers > self.layers:
            raise ConfigError(
                f"window: expected at most {self.layers} layers, got {self.window.layers}", field="window"
            )

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of KV cache per token, all layers: 2·L·Hkv·dh·bytes, or L·(rank + rope)·bytes of a latent."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rope) * self.kv_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def weights_bytes(self) -> float:
        """Of the weights that every step reads: all but those of experts."""
        return (self.block_params + self.head_params) * self.weight_bytes

    def decode_flops(self, seen_tokens: float) -> float:
        """Of the attention of new tokens that see so many, over all layers: 4·Hq·dh each."""
        latent = self.latent
        dims = 2 * self.head_dim if latent is None else 2 * latent.rank + latent.rope
        return 2.0 * self.heads * dims * seen_tokens

    def prefill_flops(self, tokens: int, context: int) -> float:
        """Of the attention of `tokens` that follow `context`: 4·L·Hq·dh·(n²/2 + n·c) without windows."""
        latent = self.latent
        dims = 2 * self.head_dim if latent is None else latent.key_dim + latent.value_dim
        pairs = tokens * (tokens / 2 + context)
        if (window := self.window) is None:
            return 2.0 * self.heads * dims * self.layers * pairs
        growing = min(max(0, window.tokens - context), tokens)  # tokens that see all before them
        windowed = growing * (growing / 2 + context) + (tokens - growing) * window.tokens
        return 2.0 * self.heads * dims * ((self.layers - window.layers) * pairs + window.layers * windowed)

    def seen_tokens(self, context_tokens: float, batch: int) -> float:
        """Tokens to which one more of each of `batch` requests attends, over all layers. With windows, as if all
        contexts were equally long."""
        if (window := self.window) is None:
            return self.layers * context_tokens
        windowed = min(context_tokens, batch * window.tokens)
        return (self.layers - window.layers) * context_tokens + window.layers * windowed

    def context_of(self, seen_tokens: float) -> float:
        """The context of which one token sees so many tokens, over all layers; of windows alone, at most the window."""
        if (window := self.window) is None or seen_tokens <= self.layers * window.tokens:
            return seen_tokens / self.layers
        whole = self.layers - window.layers
        return (seen_tokens - window.layers * window.tokens) / whole if whole else float(window.tokens)


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """One rank's device: its dense peaks, and the shares of them that kernels reach (MFU and MBU).
    `weight_flops_per_s`, `expert_flops_per_s`: of products with weights and with those of experts, where their format
    has another peak than attention has. `step_overhead_s`, `layer_overhead_s`, `row_overhead_s`: of every step, each of
    its layers, each row it samples. For layers with experts, `expert_overhead_s` more, and of `mfu` and `mbu` their
    weights reach the share `expert_efficiency`."""

    flops_per_s: float
    memory_bytes_per_s: float
    mfu: float = 1.0
    mbu: float = 1.0
    step_overhead_s: float = 0.0
    weight_flops_per_s: float | None = None
    layer_overhead_s: float = 0.0
    row_overhead_s: float = 0.0
    expert_flops_per_s: float | None = None
    expert_overhead_s: float = 0.0
    expert_efficiency: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "flops_per_s", "memory_bytes_per_s")
        for name in ("weight_flops_per_s", "expert_flops_per_s"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        require_share(self, "mfu", "mbu", "expert_efficiency")
        for name in ("step_overhead_s", "layer_overhead_s", "row_overhead_s", "expert_overhead_s"):
            if not (value := getattr(self, name)) >= 0:
                raise ConfigError(f"{name}: expected at least 0, got {value:g}", field=name)


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction of a link. `efficiency`: the share of the line rate that transfers reach."""

    bytes_per_s: float
    latency_s: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "bytes_per_s")
        require_share(self, "efficiency")
        if self.latency_s < 0:
            raise ConfigError(f"latency_s: expected at least 0, got {self.latency_s:g}", field="latency_s")


def require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ConfigError(f"{name}: expected more than 0, got {value:g}", field=name)


def require_share(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 < value <= 1:
            raise ConfigError(f"{name}: expected a share above 0 and at most 1, got {value:g}", field=name)
