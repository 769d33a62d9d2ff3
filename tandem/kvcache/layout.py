"""The shape of a rank's KV pool, without the tensor, shared by engine, transfer agent and reshard plans.

`[block, layer, side (K, V), kv_head, block_tokens, head_dim]`, C-contiguous. One block is contiguous, so a finished
prefix is transferred in few large pieces. One layer of one block is contiguous, and so is one head of it
(docs/architecture.md, KV blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DTYPE_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3": 1}
_SCALE_BYTES: Final = 4


def cell_width(head_dim: int, dtype: str) -> int:
    """Elements of one token in one head of a pool. In int8 the fp32 scale follows the values, so a copy of cells moves
    both."""
    return head_dim + _SCALE_BYTES if dtype == "int8" else head_dim


@dataclass(frozen=True, slots=True)
class KvPoolLayout:
    """One rank's pool. `kv_heads` are those of the rank, after sharding or replication. `head_dim` is the model's, or
    `cell_width` of it in int8. `joined`: K and V of a token follow each other, and `head_dim` is that of both.
    `packed`: also joined, but one head of a block has an order of its own, so a part of its tokens cannot be moved."""

    num_blocks: int
    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    joined: bool = False
    packed: bool = False

    @property
    def sides(self) -> int:
        """K and V; together they are one."""
        return 1 if self.joined else 2

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_blocks, self.layers, self.sides, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one head of one layer and side."""
        return self.head_dim * self.element_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one layer and side of one block."""
        return self.block_tokens * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block, K and V."""
        return self.sides * self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def last_tokens(self, prompt_tokens: int) -> int:
        """Number of tokens that are moved of a prompt's last block."""
        return self.block_tokens if self.packed else (prompt_tokens - 1) % self.block_tokens + 1


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Number of blocks for `tokens` tokens, counting a partial last block."""
    return -(-tokens // block_tokens)
