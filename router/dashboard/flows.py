"""KV traffic from each prefill worker to each decode worker, as decode workers report it. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

MAX_PAIRS = 1024
TIME_CONSTANT_S = 3.0

WorkerPair = tuple[str, str]  # worker ids: prefill, decode


@dataclass(slots=True)
class Flow:
    """Totals of one pair. `recent_...` decay exponentially; divided by TIME_CONSTANT_S they are rates per second."""

    handoffs: int = 0
    bytes: int = 0
    failures: int = 0
    recent_bytes: float = 0.0
    recent_handoffs: float = 0.0
    at_s: float = 0.0

    def add(self, size_bytes: int, now_s: float) -> None:
        kept = self._kept(now_s)
        self.recent_bytes = self.recent_bytes * kept + size_bytes
        self.recent_handoffs = self.recent_handoffs * kept + 1
        self.at_s = now_s
        self.handoffs += 1
        self.bytes += size_bytes

    def bytes_per_s(self, now_s: float) -> float:
        return self.recent_bytes * self._kept(now_s) / TIME_CONSTANT_S

    def handoffs_per_s(self, now_s: float) -> float:
        return self.recent_handoffs * self._kept(now_s) / TIME_CONSTANT_S

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self.at_s) / TIME_CONSTANT_S)


class Flows:
    def __init__(self) -> None:
        self._flows: OrderedDict[WorkerPair, Flow] = OrderedDict()

    def handed_off(self, pair: WorkerPair, size_bytes: int, now_s: float) -> None:
        self._of(pair).add(size_bytes, now_s)

    def failed(self, pair: WorkerPair) -> None:
        self._of(pair).failures += 1

    def items(self) -> list[tuple[WorkerPair, Flow]]:
        return list(self._flows.items())

    def _of(self, pair: WorkerPair) -> Flow:
        """The flow of a pair. A new one replaces the least recently used if there are MAX_PAIRS."""
        if (flow := self._flows.get(pair)) is not None:
            self._flows.move_to_end(pair)
            return flow
        if len(self._flows) == MAX_PAIRS:
            self._flows.popitem(last=False)
        flow = self._flows[pair] = Flow()
        return flow
