"""Tracks which blocks and layers a rank's engine has finished, and releases them to their tickets.

Pure. Ranges that arrive before their OpenSend are held, limited in number and time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvtransfer.control import Range
from tandem.clock import Clock

MAX_HELD_EXPORTS = 1024
MAX_HELD_PER_EXPORT = 16384
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Ready:
    """Logical blocks from `first_block`, in physical blocks `block_ids`, whose KV of these layers is in the pool."""

    first_block: int
    block_ids: tuple[int, ...]
    last_block_tokens: int
    layer_start: int
    layer_count: int

    def continues_with(self, other: Ready) -> bool:
        """Whether `other` covers the same blocks and the next layers."""
        same = replace(other, layer_start=self.layer_start, layer_count=self.layer_count) == self
        return same and self.layer_start + self.layer_count == other.layer_start

    def and_layers_of(self, other: Ready) -> Ready:
        return replace(self, layer_count=self.layer_count + other.layer_count)


@dataclass(slots=True)
class _Held:
    expires_s: float
    ready: list[Ready] = field(default_factory=list)


class Exports:
    def __init__(self, layers: int, clock: Clock, ttl_s: float) -> None:
        self._layers = layers
        self._clock = clock
        self._ttl_s = ttl_s
        self._step: tuple[Range, ...] = ()
        self._layers_done = 0  # of the current step
        self._open: set[str] = set()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()

    def begin_step(self, ranges: Sequence[Range]) -> list[tuple[str, Ready]]:
        """Starts a step. Returns the ranges whose KV was cached before."""
        self._step = tuple(item for item in ranges if item.block_ids and not item.in_cache)
        self._layers_done = 0
        cached = (item for item in ranges if item.block_ids and item.in_cache)
        # A request that moves a second time is sent under its former id, perhaps before its OpenSend comes.
        return self._give(((item.export_id, _ready(item, 0, self._layers)) for item in cached), reopens=True)

    def layer_done(self, layer: int) -> list[tuple[str, Ready]]:
        """Returns what this layer of the current step, and earlier layers, made ready."""
        first, end = self._layers_done, layer + 1
        if not first < end <= self._layers:
            return []
        self._layers_done = end
        return self._give((item.export_id, _ready(item, first, end - first)) for item in self._step)

    def open(self, export_id: str) -> list[Ready]:
        """Stops holding this export's ranges. Returns those held so far."""
        self._open.add(export_id)
        held = self._held.pop(export_id, None)
        return held.ready if held else []

    def close(self, export_id: str) -> None:
        """Drops all further ranges of this export."""
        self._open.discard(export_id)
        self._held.pop(export_id, None)
        self._closed[export_id] = None
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def tick(self) -> None:
        now_s = self._clock.now_s()
        for export_id in [name for name, held in self._held.items() if held.expires_s <= now_s]:
            del self._held[export_id]

    def _give(self, found: Iterable[tuple[str, Ready]], *, reopens: bool = False) -> list[tuple[str, Ready]]:
        given: list[tuple[str, Ready]] = []
        for export_id, ready in found:
            if export_id in self._open:
                given.append((export_id, ready))
            elif reopens or export_id not in self._closed:
                self._hold(export_id, ready)
        return given

    def _hold(self, export_id: str, ready: Ready) -> None:
        held = self._held.get(export_id)
        if held is None:
            while len(self._held) >= MAX_HELD_EXPORTS:
                self._held.popitem(last=False)
            held = self._held[export_id] = _Held(self._clock.now_s() + self._ttl_s)
        last = held.ready[-1] if held.ready else None
        if last and last.continues_with(ready):
            held.ready[-1] = last.and_layers_of(ready)
        elif len(held.ready) < MAX_HELD_PER_EXPORT:
            held.ready.append(ready)


def _ready(item: Range, layer_start: int, layer_count: int) -> Ready:
    return Ready(item.first_block, item.block_ids, item.last_block_tokens, layer_start, layer_count)
