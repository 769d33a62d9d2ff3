"""Arithmetic and memory traffic of an engine step, computed from the model's shape. MFU and MBU are based on it.

It has the same bounds as the planner's roofline (planner/cost.py), for steps that were run. Pure and torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem.checkpoint.model_config import ModelConfig


class StepWork(msgspec.Struct, frozen=True):  # created per chunk
    """What one step computed.

    `attended_tokens`: number of tokens attended to, summed over all computed tokens. `kv_tokens`: tokens whose KV was
    read or written. `sampled_tokens`: tokens whose logits were needed. `proposed_tokens`: of those, computed before
    they were chosen, of which `accepted_tokens` were right.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0
    kv_tokens: int = 0
    sampled_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    def with_chunk(
        self, start: int, count: int, *, decodes: bool, samples: int, proposed: int = 0, accepted: int = 0
    ) -> StepWork:
        """Adds `count` tokens of one request after `start` tokens in the KV cache, proposed ones included."""
        return StepWork(
            self.prefill_tokens + (0 if decodes else count),
            self.decode_tokens + (count if decodes else 0),
            self.attended_tokens + count * start + count * (count + 1) // 2,
            self.kv_tokens + start + count,
            self.sampled_tokens + samples,
            self.proposed_tokens + proposed,
            self.accepted_tokens + accepted,
        )


NO_WORK = StepWork()


def chosen_experts(experts: int, per_token: int, tokens: int) -> float:
    """How many of `experts` a layer reads for so many tokens, on average, if each token chooses evenly by chance."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True, slots=True)
class WorkShape:
    """A whole model (before tensor parallelism), as needed for the cost of a step.

    Attention is counted in full in every layer, which overestimates layers with a window.

    Args:
        block_params: used for each token; with experts, those of the chosen ones.
        head_params: used for each sampled token.
        attention_width: layers × query heads × head_dim.
        weights_bytes: read by every step.
        expert_bytes: of one expert index in all layers, read once if any token chose it; there are `experts`, of which
            each token chooses `experts_per_token`.
    """

    block_params: int
    head_params: int
    attention_width: int
    weights_bytes: float
    kv_token_bytes: float
    expert_bytes: float = 0.0
    experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: ModelConfig, *, weight_bytes: float, kv_bytes: float) -> WorkShape:
        """The shape of a model with elements of these sizes in its weights and KV cache."""
        hidden, query = config.hidden_size, config.heads * config.head_dim
        kv = config.kv_heads * config.head_dim
        experts = config.traits.experts
        sparse = sum(experts.sparse) if experts else 0
        attention = config.layers * (2 * hidden * query + 2 * hidden * kv)
        dense = attention + (config.layers - sparse) * 3 * hidden * config.intermediate_size
        expert = sparse * 3 * hidden * experts.expert_size if experts else 0  # of one number, in all layers
        head = hidden * config.vocab_size
        return cls(
            block_params=dense + expert * (experts.per_token if experts else 0),
            head_params=head,
            attention_width=config.layers * query,
            weights_bytes=(dense + head) * weight_bytes,
            kv_token_bytes=2 * config.layers * kv * kv_bytes,
            expert_bytes=expert * weight_bytes,
            experts=experts.count if experts else 0,
            experts_per_token=experts.per_token if experts else 0,
        )

    def flops(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + work.decode_tokens
        linear = 2.0 * (self.block_params * tokens + self.head_params * work.sampled_tokens)
        return linear + 4.0 * self.attention_width * work.attended_tokens

    def memory_bytes(self, work: StepWork) -> float:
        """Weights once, the average number of chosen experts, and the KV cache of all sequences in the step."""
        tokens = work.prefill_tokens + work.decode_tokens
        chosen = chosen_experts(self.experts, self.experts_per_token, tokens) if self.experts else 0.0
        return self.weights_bytes + chosen * self.expert_bytes + work.kv_tokens * self.kv_token_bytes
