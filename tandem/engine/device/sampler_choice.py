"""Chooses how a device draws tokens: by Triton's kernels on a GPU if they draw what torch does, else by torch."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import partial
from itertools import product
from typing import Final

import torch

from tandem.engine.device.sampler import UNDECIDED, DrawRows, sample_on_device
from tandem.engine.step import Draw

_AMPERE: Final = 8
_VOCAB: Final = 5003  # several chunks, of which the last is small
# Top-k, top-p and min-p of the rows of batches that are launched in different ways, so that all kernels are compiled.
_KINDS: Final[tuple[list[tuple[int, float, float]], ...]] = (
    [(0, 1.0, 0.0)],
    [(0, 1.0, 0.0), (0, 1.0, 0.2)],
    [*product((0, 30), (1.0, 0.9), (0.0, 0.1)), (0, 0.2, 0.0)],
)

logger = logging.getLogger(__name__)


def choose_draw_rows(device: torch.device, vocab: int) -> DrawRows | None:
    """None: torch's way."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device)[0] < _AMPERE:
        return None
    module = importlib.import_module("tandem.engine.device.triton_sampler")  # imports Triton, which CPU machines lack
    ours: DrawRows = partial(module.draw_rows, block=module.block_of(vocab))
    wrong = draw_error(ours, device)
    if wrong is None:
        return ours
    logger.warning("drawing tokens with torch, more slowly than Triton: %s", wrong)
    return None


@torch.inference_mode()
def draw_error(draw_rows: DrawRows, device: torch.device) -> str | None:
    """How tokens differ from those that torch draws, from flat, peaked and equal logits; None if none does."""
    generator = torch.Generator(device).manual_seed(0)
    try:
        for kinds in _KINDS:
            logits = torch.randn(3 * len(kinds), _VOCAB, generator=generator, device=device)
            logits[1::3] *= 6.0
            logits[2::3] = (logits[2::3] * 2.0).round()
            best = logits.argmax(dim=1)
            draws = {
                row: Draw(row, 2**64 - 1 - row, 0.8, *kinds[row // 3], None, None) for row in range(3 * len(kinds))
            }
            right = sample_on_device(logits, best, draws, best)
            expected = [
                right.decide(row) if token == UNDECIDED else token for row, token in enumerate(right.tokens.tolist())
            ]
            found = sample_on_device(logits, best, draws, best, draw_rows=draw_rows).tokens.tolist()
            for row, (token, wanted) in enumerate(zip(found, expected, strict=True)):
                if token != wanted:
                    return f"{draws[row]} gives token {token}, not {wanted}"
    except Exception as error:  # not available: no compiler, or an old driver
        return f"{type(error).__name__}: {error}"
    return None
