"""Trained parts of drafters: a folder with `config.json` and one safetensors file (docs/speculation.md has the
formats)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.json_fields import JsonFields
from tandem.errors import CheckpointError
from tandem.model.checkpoint import Checkpoint
from tandem.model.decoder import Decoder
from tandem.model.matrices import Matrix, MatrixMaker


@dataclass(frozen=True, slots=True)
class Projection:
    """Logits of normed hidden states. `matrix` [tokens, hidden] None: the model's own head. `vocabulary` [tokens]: the
    tokens of its rows; None: all."""

    model: Decoder
    matrix: Matrix | None = None
    vocabulary: Tensor | None = None

    def __call__(self, normed: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab_size] fp32, -inf for tokens that it does not know."""
        if self.matrix is None:
            return self.model.logits_of_normed(normed)
        logits = self.matrix(normed).float()
        if self.vocabulary is None:
            return logits
        whole = logits.new_full((len(logits), self.model.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.vocabulary, logits)


@dataclass(frozen=True, slots=True)
class Parts:
    """Read for `model`, with weights in the engine's format. Each method raises CheckpointError."""

    config: JsonFields
    tensors: Checkpoint
    model: Decoder
    matrix: MatrixMaker
    device: torch.device
    dtype: torch.dtype

    @classmethod
    @contextmanager
    def open(
        cls, folder: Path, file: str, model: Decoder, matrix: MatrixMaker, device: torch.device, dtype: torch.dtype
    ) -> Iterator[Parts]:
        """Raises CheckpointError too if a tensor was not read."""
        config = JsonFields.read(folder / "config.json")
        with Checkpoint.open_file(folder / file) as tensors:
            yield cls(config, tensors, model, matrix, device, dtype)
            if tensors.unread:
                raise CheckpointError(
                    f"{folder / file}: expected only tensors that config.json describes, got also {min(tensors.unread)}"
                )

    def count(self, field: str, most: int, *, default: int | None = None) -> int:
        found = self.config.positive_int(field, default=default)
        if found > most:
            raise self.config.wrong(field, f"at most {most}", found)
        return found

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.tensors.read(name, shape).clone().to(self.device, self.dtype)

    def projection(self, name: str) -> Projection:
        """The tensor `name`, of the tokens in config.json's `vocabulary`; the model's own head if there is none."""
        if name not in self.tensors:
            return Projection(self.model)
        size, ids = self.model.config.vocab_size, self.config.counts("vocabulary", "a list of token ids")
        if len(set(ids)) < len(ids) or max(ids, default=0) >= size:
            raise self.config.wrong("vocabulary", f"different token ids from 0 to {size - 1}", f"{len(ids)} numbers")
        weight = self.tensor(name, len(ids) or size, self.model.config.hidden_size)
        vocabulary = torch.tensor(ids, dtype=torch.int64, device=self.device) if ids else None
        return Projection(self.model, self.matrix.of_vocabulary(weight), vocabulary)
