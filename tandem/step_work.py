"""How much arithmetic and memory traffic an engine step is, by the model's shape: what MFU and MBU are shares of.

The same bounds as the planner's roofline (planner/cost.py), of steps that were really run. Pure and torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computed. `attended_tokens`: over all computed tokens, how many each one attended to. `kv_tokens`:
    tokens whose KV was read or written. `sampled_tokens`: those whose logits were needed."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0
    kv_tokens: int = 0
    sampled_tokens: int = 0

    def with_chunk(self, start: int, count: int, *, decodes: bool, samples: bool) -> StepWork:
        """And `count` tokens of one request that follow `start` tokens in the KV cache."""
        return StepWork(
            self.prefill_tokens + (0 if decodes else count),
            self.decode_tokens + (count if decodes else 0),
            self.attended_tokens + count * start + count * (count + 1) // 2,
            self.kv_tokens + start + count,
            self.sampled_tokens + samples,
        )


NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class WorkShape:
    """A model, whole (before tensor parallelism), as far as the cost of a step goes.

    `block_params`: used once for each token; `head_params`: for each sampled one. `attention_width`: layers times query
    heads times head_dim.
    """

    block_params: int
    head_params: int
    attention_width: int
    weights_bytes: float
    kv_token_bytes: float

    @classmethod
    def of(cls, config: ModelConfig, element_bytes: int) -> WorkShape:
        """Of a model whose weights and KV cache have elements of that size."""
        hidden, query = config.hidden_size, config.heads * config.head_dim
        kv = config.kv_heads * config.head_dim
        block_params = config.layers * (2 * hidden * query + 2 * hidden * kv + 3 * hidden * config.intermediate_size)
        head_params = hidden * config.vocab_size
        return cls(
            block_params=block_params,
            head_params=head_params,
            attention_width=config.layers * query,
            weights_bytes=(block_params + head_params) * element_bytes,
            kv_token_bytes=2 * config.layers * kv * element_bytes,
        )

    def flops(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + work.decode_tokens
        linear = 2.0 * (self.block_params * tokens + self.head_params * work.sampled_tokens)
        return linear + 4.0 * self.attention_width * work.attended_tokens

    def memory_bytes(self, work: StepWork) -> float:
        """Weights once, and the KV cache of all whose turn it was."""
        return self.weights_bytes + work.kv_tokens * self.kv_token_bytes
