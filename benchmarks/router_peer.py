"""A prefix index of another project, if it is installed: ai-dynamo-runtime's RadixTree, through its Python binding.

It is not a dependency of Tandem. `pip install --no-deps ai-dynamo-runtime` is enough to run it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

from tandem.kvcache.blockhash import BlockHash


class PeerTree:
    def __init__(self, tree: Any) -> None:  # the package has no types
        self._tree = tree
        self._events = 0

    def store(self, worker: int, chain: Sequence[BlockHash]) -> None:
        self._tree.apply_event(worker, self._stored(None, self.query(chain)))

    def query(self, chain: Sequence[BlockHash]) -> list[int]:
        """The chain in the peer's format."""
        return [int.from_bytes(each[:8], "little") for each in chain]

    def match(self, query: list[int]) -> object:
        return self._tree.find_matches(query).scores

    def single_events(self, blocks: Sequence[BlockHash]) -> list[bytes]:
        """Events that store one block each, each block the first of a chain."""
        return [self._stored(None, [number]) for number in self.query(blocks)]

    def apply(self, events: Sequence[bytes]) -> None:
        for event in events:
            self._tree.apply_event(0, event)

    def _stored(self, parent: int | None, blocks: Sequence[int]) -> bytes:
        self._events += 1
        stored = {
            "parent_hash": parent,
            "blocks": [{"block_hash": number, "tokens_hash": number} for number in blocks],
        }
        return json.dumps({"event_id": self._events, "data": {"stored": stored}}).encode()


def peer_tree() -> PeerTree | None:
    try:
        return PeerTree(importlib.import_module("dynamo._core").RadixTree())
    except ImportError:
        return None
