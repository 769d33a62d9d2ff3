"""Loads one rank's shard of a Hugging Face checkpoint of any family."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tandem.checkpoint.model_config import ModelConfig
from tandem.errors import CheckpointError
from tandem.model.checkpoint import Checkpoint
from tandem.model.decoder import Decoder
from tandem.model.device_ops import choose_ops
from tandem.model.families import LAYERS
from tandem.model.matrices import MatrixMaker
from tandem.model.parallel import TensorParallel
from tandem.model.reader import WeightReader
from tandem.model.rope import Rope

# Buffers that older writers stored; the model computes them itself.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


def load_model(
    model_dir: Path,
    config: ModelConfig,
    tp: TensorParallel,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    max_tokens: int | None = None,
    matrix: MatrixMaker | None = None,
) -> Decoder:
    """Reads only this rank's slices.

    Args:
        matrix: how products are computed; its kernels, if any, also do element-wise work. None: torch.
        max_tokens: longest served context; None: the model's own.

    Raises ConfigError if the model is not divisible by `tp.size`, and CheckpointError naming tensor and file if a
    tensor is missing, unexpected, unreadable, not finite or of a wrong shape.
    """
    config.check_tp(tp.size)
    device = torch.device(device)
    traits = config.traits
    with Checkpoint.open(model_dir, device, may_be_body=True) as checkpoint, torch.inference_mode():
        matrix = matrix or MatrixMaker()
        ops = choose_ops(matrix.kernels, device, dtype)
        reader = WeightReader(checkpoint, config, tp, device, dtype, ops, matrix)
        embedding_and_head = reader.embedding_and_head()
        layers = [LAYERS[config.architecture](reader, number) for number in range(config.layers)]
        _refuse_unknown(checkpoint, config)
    ropes = [traits.rope] if traits.window_rope is None else [traits.rope, traits.window_rope]
    longest = max_tokens or config.max_position_tokens
    return Decoder(config, [Rope(each, longest, device, dtype) for each in ropes], embedding_and_head, layers)


def _refuse_unknown(checkpoint: Checkpoint, config: ModelConfig) -> None:
    known = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(checkpoint.unread - known):
        if not _IGNORED.fullmatch(name):
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: expected only tensors of {config.architecture} with {config.layers} "
                f"layers, got also {name}"
            )
