"""Fits an EAGLE-3 head to a model's own answers (Li et al., 2025, arXiv:2503.01840).

As in the paper it learns from what it says itself, too: after a pass over an answer with the model's hidden states, it
takes what it made of each position for those of the next one, and so on (the paper's training-time test).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.checkpoint.json_fields import read_json_object
from tandem.checkpoint.model_config import ModelConfig
from tandem.engine.drafts.eagle import TAPS, usual_taps
from tandem.model.checkpoint import SINGLE_FILE, Checkpoint
from tandem.model.rope import scaled_frequencies
from tandem.training.fitting import HELD_OUT, WEIGHT_AHEAD, Report, Vocabulary, cross_entropy, descend, write_parts
from tandem.training.own_answers import Answer

DEPTH: Final = 3  # passes over an answer, each on what the one before said
TOGETHER: Final = 1  # answers in a step of fitting


@dataclass(frozen=True, slots=True)
class Head:
    """The tensors that are fitted, by their published names."""

    tensors: dict[str, Tensor]
    config: ModelConfig
    frequencies: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self[name], self.config.rms_norm_eps)

    def heads(self, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """[answers, tokens, 2 · hidden] → [answers, query heads, tokens, head_dim], rotated if positions are given."""
        y = F.linear(x, self[f"midlayer.self_attn.{name}"])
        y = y.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)
        if positions is not None:
            angles = torch.outer(positions, self.frequencies)
            cos, sin = angles.cos(), angles.sin()
            first, second = y.chunk(2, dim=-1)
            y = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return y.repeat_interleave(self.config.heads // y.shape[1], dim=1)

    def logits(self, embedded: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        """Of each pass [answers, tokens, vocabulary]. embedded [answers, tokens + depth, hidden] begins at the first
        token, states [answers, tokens, 3 · hidden] before it."""
        count, hidden = states.shape[1], F.linear(states, self["fc"])
        keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()
        unseen = torch.ones(count, count, dtype=torch.bool).triu(1)
        for ahead in range(depth):
            normed = self.norm("midlayer.hidden_norm", hidden)
            tokens = self.norm("midlayer.input_layernorm", embedded[:, ahead : ahead + count])
            x = torch.cat((tokens, normed), dim=-1)
            positions = torch.arange(count, dtype=torch.float32) + ahead
            q = self.heads("q_proj", x, positions) * self.config.head_dim**-0.5
            keys.append(self.heads("k_proj", x, positions))
            values.append(self.heads("v_proj", x, None))
            if not ahead:  # the engine's first position has keys and values of zero
                keys[0], values[0] = (
                    torch.cat((torch.zeros_like(e[:, :, :1]), e[:, :, 1:]), dim=2) for e in (keys[0], values[0])
                )
            first = (q @ keys[0].transpose(-1, -2)).masked_fill(unseen, -torch.inf)
            later = [(q * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
            chances = torch.cat((first, *later), dim=-1).softmax(dim=-1)
            attended = chances[..., :count] @ values[0]
            for place, value in enumerate(values[1:]):
                attended = attended + chances[..., count + place, None] * value
            hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), self["midlayer.self_attn.o_proj"])
            y = self.norm("midlayer.post_attention_layernorm", hidden)
            gated = F.silu(F.linear(y, self["midlayer.mlp.gate_proj"])) * F.linear(y, self["midlayer.mlp.up_proj"])
            hidden = hidden + F.linear(gated, self["midlayer.mlp.down_proj"])
            found.append(F.linear(self.norm("norm", hidden), self["lm_head"]))
        return found


def begun(model_dir: Path, config: ModelConfig, vocabulary: Vocabulary) -> Head:
    """Begins as the model's last layer, on the last of the three hidden states."""
    draw, width = torch.Generator().manual_seed(0), config.hidden_size
    tensors = {"midlayer.input_layernorm.weight": torch.ones(width)}  # of tokens
    last = f"model.layers.{config.layers - 1}."
    with Checkpoint.open(model_dir) as checkpoint:

        def norm(name: str) -> Tensor:
            if f"{name}.weight" not in checkpoint:
                return torch.ones(width)
            return checkpoint.read(f"{name}.weight", [width]).float() + config.traits.norm_offset

        tensors["midlayer.hidden_norm.weight"] = norm(f"{last}input_layernorm")
        tensors["midlayer.post_attention_layernorm.weight"] = norm(f"{last}post_attention_layernorm")
        tensors["norm.weight"] = norm("model.norm")

        def read(name: str, *shape: int) -> Tensor:
            if f"{last}{name}.weight" in checkpoint:
                return checkpoint.read(f"{last}{name}.weight", shape).float()
            return torch.randn(shape, generator=draw) / math.sqrt(shape[1])

        for name, rows in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            own = read(f"self_attn.{name}_proj", rows * config.head_dim, width)
            tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat((torch.zeros_like(own), own), dim=1)
        tensors["midlayer.self_attn.o_proj.weight"] = read("self_attn.o_proj", width, config.heads * config.head_dim)
        for name in ("gate", "up"):
            tensors[f"midlayer.mlp.{name}_proj.weight"] = read(f"mlp.{name}_proj", config.intermediate_size, width)
        tensors["midlayer.mlp.down_proj.weight"] = read("mlp.down_proj", width, config.intermediate_size)
    tensors["fc.weight"] = torch.cat((torch.zeros(width, (TAPS - 1) * width), torch.eye(width)), dim=1)
    tensors["lm_head.weight"] = vocabulary.head.clone()
    frequencies = scaled_frequencies(config.traits.rope, config.max_position_tokens)
    return Head({name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}, config, frequencies)


def fit_eagle(
    head: Head,
    answers: Sequence[Answer],
    tapped: Sequence[Tensor],
    embedding: Tensor,
    vocabulary: Vocabulary,
    passes: int,
    report: Report,
) -> dict[str, Tensor]:
    """`tapped`: of each answer [tokens, 3 · hidden]; `embedding` [vocab_size, hidden]."""

    def logits_and_targets(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each pass over the answers `rows`."""
        some = [answers[row] for row in rows.tolist()]
        longest = max(len(answer.tokens) for answer in some)
        tokens = torch.zeros(len(some), longest + DEPTH, dtype=torch.int64)
        chosen = torch.full((len(some), longest + DEPTH), -1)
        states = torch.zeros(len(some), longest, TAPS * head.config.hidden_size)
        for place, (row, answer) in enumerate(zip(rows.tolist(), some, strict=True)):
            count = len(answer.tokens)
            tokens[place, :count] = torch.tensor(answer.tokens)
            chosen[place, answer.begin : count] = tokens[place, answer.begin : count]
            states[place, 1:count] = tapped[row][: count - 1]
        targets = vocabulary.places(chosen.flatten()).view_as(chosen)
        found = head.logits(embedding[tokens], states, DEPTH)
        return [(logits, targets[:, ahead + 1 : ahead + 1 + longest]) for ahead, logits in enumerate(found)]

    def loss(rows: Tensor) -> Tensor:
        each = [
            WEIGHT_AHEAD**ahead * cross_entropy(logits.flatten(0, 1), targets.flatten())
            for ahead, (logits, targets) in enumerate(logits_and_targets(rows))
        ]
        return torch.stack(each).sum()

    known = max(1, int(len(answers) * (1 - HELD_OUT)))
    fresh = [tensor for name, tensor in head.tensors.items() if name != "lm_head.weight"]
    descend(loss, fresh, [head["lm_head"]], known, passes, report, rows=TOGETHER)
    with torch.no_grad():
        right, there = torch.zeros(DEPTH), torch.zeros(DEPTH)
        for row in range(known, len(answers)):
            for ahead, (logits, targets) in enumerate(logits_and_targets(torch.tensor([row]))):
                right[ahead] += ((logits.argmax(dim=-1) == targets) & (targets >= 0)).sum()
                there[ahead] += (targets >= 0).sum()
        for ahead in range(DEPTH):
            report(f"token {ahead + 1}: {right[ahead] / there[ahead].clamp(min=1):.1%} right, of answers not fitted to")
    return {name: tensor.detach() for name, tensor in head.tensors.items()}


def write_eagle(
    folder: Path, tensors: dict[str, Tensor], model_dir: Path, vocabulary: Vocabulary, config: ModelConfig
) -> None:
    """In the published format, with the model's own config.json where both have a field."""
    ids = torch.tensor(vocabulary.ids)
    more = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(config.vocab_size), ids)}
    fields = read_json_object(model_dir / "config.json") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": config.head_dim,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*usual_taps(config.layers)]},
    }
    write_parts(folder, SINGLE_FILE, tensors | more, fields)
