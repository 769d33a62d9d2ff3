"""Block hashes identify the content of KV blocks for workers, routers and the prefix index.

A hash covers the block's tokens, the images that begin in it and, through the previous block's hash, all before it. It
is keyed by model, adapter and tenant salt: 128 bits of keyed BLAKE2b, so a collision cannot be constructed without the
salt (references.md, "weak block hashes").
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.images import PromptImage

HASH_BYTES = 16
BlockHash = bytes  # HASH_BYTES long


@dataclass(frozen=True, slots=True)
class HashKey:
    """The key of a chain. Two requests share cached blocks only if all three fields match."""

    model_fingerprint: str
    adapter: str = ""
    cache_salt: bytes = b""

    def root(self) -> bytes:
        parts = (self.model_fingerprint.encode(), self.adapter.encode(), self.cache_salt)
        sized = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hashlib.blake2b(sized, digest_size=32, person=b"tandem.block.v1").digest()


def hash_blocks(
    tokens: Sequence[int],
    block_tokens: int,
    key: HashKey,
    *,
    parent: BlockHash | None = None,
    images: Sequence[PromptImage] = (),
    first_token: int = 0,
) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; a partial last block has none.

    `parent` continues a chain: the hash of the block before `tokens[0]`, whose position in the prompt is `first_token`.
    `images`: the prompt's.
    """
    full = tokens[: len(tokens) // block_tokens * block_tokens]
    words = struct.pack(f"<{len(full)}I", *full)
    step = 4 * block_tokens
    previous = parent if parent is not None else b""
    hashes: list[BlockHash] = []
    keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=key.root()).copy  # cheaper than a new keyed hash per block
    begun: defaultdict[int, bytes] = defaultdict(bytes)  # of the images, by the first byte of their blocks
    for each in images:
        place, within = divmod(4 * (each.start - first_token), step)
        begun[place * step] += struct.pack("<I", within) + each.digest
    for start in range(0, len(words), step):
        digest = keyed()
        digest.update(previous + words[start : start + step])
        if start in begun:
            digest.update(begun[start])
        previous = digest.digest()
        hashes.append(previous)
    return hashes
