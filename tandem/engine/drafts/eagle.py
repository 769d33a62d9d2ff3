"""EAGLE-3: one layer that drafts from what the model's own layers say (Li et al., 2025, arXiv:2503.01840).

Its input at a position is the token there and the hidden states, of three layers, at the position before. Its keys and
values are one more layer of the model's KV. They depend on no later token, so they are right wherever that KV is found:
in the prefix cache, after a handoff and after a move. Where the hidden states before a token are not known they are
zero: at the first position, and where a request goes on from KV that this worker did not compute a step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoint.json_fields import JsonFields
from tandem.checkpoint.model_config import ModelConfig
from tandem.engine.device.copies import to_device
from tandem.engine.drafts.drafter import AttendOf, Chain, Computed
from tandem.engine.drafts.parts import Projection
from tandem.engine.step import Drafted, SequenceStep
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
        config.check_tp(tp.size, "tp of the EAGLE-3 head")
        with Checkpoint.open(folder, device) as tensors, torch.inference_mode():
            reader = WeightReader(tensors, config, tp, device, dtype, choose_ops(matrix.kernels, device, dtype), matrix)
            found = cls._read(fields, reader, model)
            for name in ("t2d", "d2t", "embed_tokens.weight"):  # what d2t says, or nothing, and the model's own
                tensors.leave(name)
            if tensors.unread:
                raise CheckpointError(
                    f"{folder / SINGLE_FILE}: expected only tensors of an EAGLE-3 head, got also {min(tensors.unread)}"
                )
        return found, config

    @classmethod
    def _read(cls, fields: JsonFields, reader: WeightReader, model: Decoder) -> EagleLayer:
        tensors, hidden, size = reader.checkpoint, reader.config.hidden_size, model.config.vocab_size
        known, vocabulary = fields.positive_int("draft_vocab_size", default=size), None
        if known != size:  # d2t: what to add to the number of a row
            vocabulary = tensors.read_ids("d2t", known) + torch.arange(known, device=reader.device)
            if int(vocabulary.min()) < 0 or int(vocabulary.max()) >= size or len(set(vocabulary.tolist())) < known:
                raise CheckpointError(f"{tensors.file_of('d2t')}: d2t: expected different tokens of the model")
        prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
        head = tensors.read("lm_head.weight", [known, hidden]).to(reader.device, reader.dtype, copy=True)
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
            project=Projection(model, reader.matrix.of_vocabulary(head), vocabulary),
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


def has_none(config: ModelConfig) -> str | None:
    """Why a model can have no EAGLE-3 head. None: it can."""
    if config.traits.widest_window is not None:
        return (
            "eagle3 is for models with a layer that reads all tokens: this one releases blocks, which a head would read"
        )
    if config.traits.attention_softcap is not None:
        return "eagle3 is for models whose attention scores are not capped"
    if config.layers < 2:
        return "eagle3 is for models of two layers or more: a head reads what the later ones get"
    return None


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
    """Drafts with an EAGLE-3 head. Its KV is at layer `_place` of the model's pool.

    Of the step before, it keeps what the layers `taps` got at the places from which a request may go on: at each of
    its sampled tokens, or at the last one of a piece of its prompt. Such a place is a block and a position: while a
    block is not full, it is of one request.
    """

    def __init__(
        self,
        model: Decoder,
        eagle: EagleLayer,
        rope: Rope,
        attend_of: AttendOf,
        device: torch.device,
        block_tokens: int,
    ) -> None:
        super().__init__(model, attend_of, device)
        self.taps = eagle.taps
        self._eagle = eagle
        self._rope = rope
        self._block_tokens = block_tokens
        self._place = len(model.layers)
        self._kept = torch.empty(0, device=device)  # [places, 3 · hidden]
        self._rows: dict[tuple[int, int], int] = {}  # of `_kept`
        self._states: dict[int, Tensor] = {}  # [hidden] before a request's next token, while it drafts

    def _at(self, numbers: Iterable[int]) -> Tensor:
        """[numbers] int64, copied without waiting for a kernel."""
        return to_device(np.array([*numbers], dtype=np.int64), self._device)

    def _place_of(self, sequence: SequenceStep, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self._block_tokens], position

    def _before(self, sequences: Mapping[int, SequenceStep]) -> dict[int, Tensor]:
        """States before the first token of those for which they are known."""
        rows = {
            number: row
            for number, each in sequences.items()
            if each.start and (row := self._rows.get(self._place_of(each, each.start - 1))) is not None
        }
        return dict(zip(rows, self._eagle.fuse(self._kept[self._at(rows.values())]), strict=True)) if rows else {}

    def draft(self, sequences: Sequence[SequenceStep]) -> list[Drafted]:
        drafting = {number: each for number, each in enumerate(sequences) if each.draft and each.draft.count}
        unknown = self._kept.new_zeros(self._model.config.hidden_size)
        self._states = dict.fromkeys(drafting, unknown) | self._before(drafting)
        return super().draft(sequences)

    def _logits(self, inputs: Mapping[int, SequenceStep]) -> Tensor:
        steps = [*inputs.values()]
        tokens, positions = self._at(each.token_ids[0] for each in steps), self._at(each.start for each in steps)
        states = torch.stack([self._states[number] for number in inputs])
        embedded, rotation = self._model.embedded(tokens), self._rope.rotation(positions)
        residual, q, k, v = self._eagle.projected(embedded, states, rotation)
        hidden = self._eagle.after(residual, self._attend_of(steps)(self._place, q, k, v))
        self._states.update(zip(inputs, hidden, strict=True))
        self.passes, self.rows = self.passes + 1, self.rows + len(inputs)
        if self.after_layer is not None:
            self.after_layer()
        return self._eagle.project(self._eagle.norm(hidden))[:, : self._vocab_size]

    def keep(self, step: Computed) -> None:
        """Computes the keys and values of the step's tokens, those of drafted ones anew."""
        counts = [len(each.token_ids) for each in step.sequences]
        firsts = [end - count for count, end in zip(counts, accumulate(counts), strict=True)]
        tapped = torch.cat([step.tapped[tap] for tap in self.taps], dim=1)
        states = tapped.new_zeros(len(tapped), self._model.config.hidden_size)
        if len(tapped) > len(counts):
            states[1:] = self._eagle.fuse(tapped[:-1])
        before = self._before(dict(enumerate(step.sequences)))
        if before:
            states[self._at(firsts[number] for number in before)] = torch.stack([*before.values()])
        unknown = self._at(first for number, first in enumerate(firsts) if number not in before)
        embedded, rotation = self._model.embedded(step.tokens), self._rope.rotation(step.positions)
        _, _, k, v = self._eagle.projected(embedded, states, rotation)
        k[unknown], v[unknown] = 0, 0
        step.attend.store(self._place, k, v)
        places: dict[tuple[int, int], int] = {}  # to rows of the step
        for first, count, each in zip(firsts, counts, step.sequences, strict=True):
            for offset in range(count - max(1, each.samples), count):
                places[self._place_of(each, each.start + offset)] = first + offset
        self._kept = tapped[self._at(places.values())]
        self._rows = {place: row for row, place in enumerate(places)}
