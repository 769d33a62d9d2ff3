"""A peer's prefix index, where its package is installed: ai-dynamo-runtime's RadixTree, through its Python binding.

It is no dependency of Tandem and nothing here is needed to run it; `pip install --no-deps ai-dynamo-runtime` is enough.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

from tandem.kvcache.blockhash import BlockHash


class PeerTree:
    def __init__(self, tree: Any) -> None:  # no types come with the package
        self._tree = tree
        self._events = 0

    def store(self, worker: int, chain: Sequence[BlockHash]) -> None:
        self._tree.apply_event(worker, self._stored(None, self.question(chain)))

    def question(self, chain: Sequence[BlockHash]) -> list[int]:
        """The chain as the peer wants it."""
        return [int.from_bytes(each[:8], "little") for each in chain]

    def match(self, question: list[int]) -> object:
        return self._tree.find_matches(question).scores

    def single_events(self, blocks: Sequence[BlockHash]) -> list[bytes]:
        """Blocks stored one by one, each a chain's first."""
        return [self._stored(None, [number]) for number in self.question(blocks)]

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
