"""Block hashes: the identity of a KV block's content, shared by workers, routers and the prefix index.

A block's hash is chained: it covers the block's own tokens and, through the hash before it, every token that came
earlier, and it is keyed by model, adapter and tenant salt. 128 bits of keyed BLAKE2b, so that no one who does not
know the salt can aim for a collision (references.md, "weak block hashes").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HASH_BYTES = 16
BlockHash = bytes  # HASH_BYTES long


@dataclass(frozen=True, slots=True)
class HashKey:
    """What a chain starts from. Two requests share cached blocks only when all three agree."""

    model_fingerprint: str
    adapter: str = ""
    cache_salt: bytes = b""

    def root(self) -> bytes:
        parts = (self.model_fingerprint.encode(), self.adapter.encode(), self.cache_salt)
        sized = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.blake2b(sized, digest_size=32, person=b"tandem.block.v1").digest()


def hash_blocks(
    tokens: Sequence[int], block_tokens: int, key: HashKey, *, parent: BlockHash | None = None
) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; a partial last block has none.

    `parent` continues a chain: the hash of the block just before `tokens[0]`.
    """
    root = key.root()
    words = np.asarray(tokens[: len(tokens) // block_tokens * block_tokens], dtype="<u4").tobytes()
    step = 4 * block_tokens
    previous = parent if parent is not None else b""
    hashes: list[BlockHash] = []
    for start in range(0, len(words), step):
        digest = hashlib.blake2b(previous + words[start : start + step], digest_size=HASH_BYTES, key=root)
        previous = digest.digest()
        hashes.append(previous)
    return hashes
