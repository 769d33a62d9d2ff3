"""Checks block tables before kernels use them as addresses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InternalError


def check_blocks(blocks: NDArray[np.signedinteger], num_blocks: int) -> None:
    """Raises InternalError if a block is not one of `num_blocks`: a kernel would read or write other memory."""
    unsigned = blocks.view(f"u{blocks.itemsize}")  # a negative one is a large one: one pass instead of two
    if blocks.size and int(np.maximum.reduce(unsigned, axis=None)) >= num_blocks:
        raise InternalError(
            f"a step's block tables: expected blocks from 0 to {num_blocks - 1}, got {int(blocks.min())} to "
            f"{int(blocks.max())}; nothing was read or written"
        )
