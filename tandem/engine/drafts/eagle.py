"""EAGLE-3: one layer that drafts from what the model's own layers say (Li et al., 2025, arXiv:2503.01840).

Its input at a position is the token there and the hidden states, of three layers, at the position before. Its keys and
values are one more layer of the model's KV. They depend on no later token, so they are right wherever that KV is found:
in the prefix cache, after a handoff and after a move. Where the hidden states before a step's first token are not known
they are zero, which attention hardly sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoint.json_fields import JsonFields
from tandem.checkpoint.model_config import ModelConfig
from tandem.engine.device.copies import to_device
from tandem.engine.drafts.drafter import AttendOf, Chain, Computed, Drafted
from tandem.engine.drafts.parts import Projection
from tandem.engine.step import SequenceStep
from tandem.errors import CheckpointError
from tandem.model.checkpoint import SINGLE_FILE, Checkpoint
from tandem.model.decoder import Attention, Decoder
from tandem.model.device_ops import choose_ops
from tandem.model.layers import GatedMlp, RmsNorm
from tandem.model.matrices import Matrix, MatrixMaker
from tandem.model.parallel import TensorParallel
from tandem.model.reader import WeightReader
from tandem.model.rope import Rope, Rotation

TAPS: Final = 3
_SAME: Final = {  # as the model's; with their names in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """`taps`: the model's layers whose input it reads. `fuse` [hidden, 3 · hidden]."""

    taps: tuple[int, ...]
    fuse: Matrix
    token_norm: RmsNorm
    state_norm: RmsNorm
    adds_normed: bool
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp
    norm: RmsNorm
    project: Projection

    @classmethod
    def load(
        cls,
        folder: Path,
        model: Decoder,
        tp: TensorParallel,
        matrix: MatrixMaker,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[EagleLayer, ModelConfig]:
        """The published format, for `model`. Raises CheckpointError."""
        fields = JsonFields.read(folder / "config.json")
        config = ModelConfig.load(folder, "LlamaForCausalLM")
        for name, field in _SAME.items():
            if (own := getattr(config, name)) != (expected := getattr(model.config, name)):
                raise fields.wrong(field, f"{expected}, as the model's", own)
        for name in ("norm_before_fc", "fc_norm", "norm_output"):  # of other forms of the layer
            if fields.boolean(name):
                raise fields.wrong(name, "false", True)
        if config.layers != 1:
            raise fields.wrong("num_hidden_layers", "1", config.layers)
        with Checkpoint.open(folder, device) as tensors, torch.inference_mode():
            reader = WeightReader(tensors, config, tp, device, dtype, choose_ops(matrix.kernels, device, dtype), matrix)
            found = cls._read(fields, reader, model)
            for name in ("t2d", "embed_tokens.weight"):  # what d2t says, and the model's own
                tensors.leave(name)
            if tensors.unread:
                raise CheckpointError(
                    f"{folder / SINGLE_FILE}: expected only tensors of an EAGLE-3 head, got also {min(tensors.unread)}"
                )
        return found, config

    @classmethod
    def _read(cls, fields: JsonFields, reader: WeightReader, model: Decoder) -> EagleLayer:
        tensors, hidden = reader.checkpoint, reader.config.hidden_size
        prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
        known = fields.positive_int("draft_vocab_size", default=model.config.vocab_size)
        vocabulary, head = None, None
        if "d2t" in tensors:  # what to add to the number of a row
            vocabulary = tensors.read_ids("d2t", known) + torch.arange(known, device=reader.device)
            if int(vocabulary.min()) < 0 or int(vocabulary.max()) >= model.config.vocab_size:
                raise CheckpointError(f"{tensors.file_of('d2t')}: d2t: expected tokens of the model's vocabulary")
        if "lm_head.weight" in tensors:
            weight = tensors.read("lm_head.weight", [known, hidden]).to(reader.device, reader.dtype, copy=True)
            head = reader.matrix.of_vocabulary(weight)
        fuse = tensors.read("fc.weight", [hidden, TAPS * hidden]).to(reader.device, reader.dtype, copy=True)
        return cls(
            taps=_taps(fields, len(model.layers)),
            fuse=reader.matrix(fuse),
            token_norm=reader.norm(prefix + "input_layernorm"),
            state_norm=reader.norm(prefix + "hidden_norm"),
            adds_normed=fields.boolean("norm_before_residual", default=False),
            attention=reader.attention(prefix + "self_attn.", width=2 * hidden),
            mlp_norm=reader.norm(prefix + "post_attention_layernorm"),
            mlp=reader.mlp(prefix + "mlp."),
            norm=reader.norm("norm"),
            project=Projection(model, head, vocabulary),
        )

    def projected(self, embedded: Tensor, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """embedded, states [tokens, hidden] → what attention is added to, and q, k, v."""
        normed = self.state_norm(states)
        q, k, v = self.attention.project(torch.cat((self.token_norm(embedded), normed), dim=1), rotation)
        return normed if self.adds_normed else states, q, k, v

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """→ [tokens, hidden], which are the states at the next position."""
        x, normed = self.mlp_norm.of_sum(residual, self.attention.out(attended))
        return x + self.mlp(normed)


def usual_taps(layers: int) -> tuple[int, ...]:
    """Of the published heads; in a model of few layers the nearest that there are."""
    return tuple(min(max(1, tap), layers - 1) for tap in (2, layers // 2, layers - 3))


def _taps(fields: JsonFields, layers: int) -> tuple[int, ...]:
    named = fields.part("eagle_config") if fields.has("eagle_config") else fields
    taps = named.counts("eagle_aux_hidden_state_layer_ids", "layer numbers") or usual_taps(layers)
    if len(taps) != TAPS or not all(0 < tap < layers for tap in taps):
        raise named.wrong("eagle_aux_hidden_state_layer_ids", f"{TAPS} layers from 1 to {layers - 1}", taps)
    return taps


class Eagle(Chain):
    """Drafts with an EAGLE-3 head. Its KV is at layer `place` of the model's pool."""

    def __init__(
        self, model: Decoder, eagle: EagleLayer, rope: Rope, attend_of: AttendOf, device: torch.device
    ) -> None:
        super().__init__(model, attend_of, device)
        self._eagle = eagle
        self._rope = rope
        self._place = len(model.layers)
        self._tapped: dict[int, Tensor] = {}  # of the step under way
        self._kept: Tensor | None = None  # [samples, 3 · hidden], of the step before
        self._before: dict[int, Tensor] = {}  # [hidden], by place: states at the position before the first token
        self._states: dict[int, Tensor] = {}  # the same, of the pass under way

    def entered(self, layer: int, hidden: Tensor) -> None:
        if layer in self._eagle.taps:
            self._tapped[layer] = hidden

    def draft(self, sequences: Sequence[SequenceStep]) -> Drafted:
        samples = {place: each.draft.sample for place, each in enumerate(sequences) if each.draft is not None}
        if self._kept is not None and samples:
            fused = self._eagle.fuse(self._kept[[*samples.values()]])
            self._before = dict(zip(samples, fused, strict=True))
        self._states = dict(self._before)
        return super().draft(sequences)

    def _logits(self, inputs: Mapping[int, SequenceStep]) -> Tensor:
        tokens = to_device(np.array([each.token_ids[0] for each in inputs.values()], dtype=np.int64), self._device)
        positions = to_device(np.array([each.start for each in inputs.values()], dtype=np.int64), self._device)
        states = torch.stack([self._states[place] for place in inputs])
        rotation = self._rope.rotation(positions)
        residual, q, k, v = self._eagle.projected(self._model.embedded(tokens), states, rotation)
        hidden = self._eagle.after(residual, self._attend_of([*inputs.values()])(self._place, q, k, v))
        self._states.update(zip(inputs, hidden, strict=True))
        self.passes, self.rows = self.passes + 1, self.rows + len(inputs)
        return self._eagle.project(self._eagle.norm(hidden))[:, : self._vocab_size]

    def keep(self, step: Computed) -> None:
        """Computes the keys and values of the step's tokens, those of drafted ones anew."""
        tapped = torch.cat([self._tapped[tap] for tap in self._eagle.taps], dim=1)
        counts = np.array([len(each.token_ids) for each in step.sequences])
        firsts = np.cumsum(counts) - counts
        if len(tapped) > len(counts):
            states = self._eagle.fuse(tapped).roll(1, dims=0)
        else:
            states = step.hidden.new_empty(len(tapped), self._model.config.hidden_size)
        unknown = [int(row) for place, row in enumerate(firsts) if place not in self._before]
        if self._before:
            states[firsts[[*self._before]]] = torch.stack([*self._before.values()])
        states[unknown] = 0
        rotation = self._rope.rotation(step.positions)
        _, _, k, v = self._eagle.projected(self._model.embedded(step.tokens), states, rotation)
        k[unknown], v[unknown] = 0, 0
        step.attend.store(self._place, k, v)
        self._kept, self._before, self._tapped = tapped[step.samples], {}, {}
