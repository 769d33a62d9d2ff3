"""Workers of one host take turns with its cores: a step lasts longer while others compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.errors import ConfigError

if TYPE_CHECKING:
    from planner.simulator.events import EventLoop


@dataclass(frozen=True, slots=True)
class HostCores:
    """`cores`: one for each rank that computes at a time, so half of the host's where a rank has two threads.
    `contention`: how many times as long a step lasts while all compute, as they share caches, memory and often more;
    `tandem profile` measures it. What router, agents and clients take of the cores is not in it."""

    cores: int
    contention: float = 1.0

    def __post_init__(self) -> None:
        if self.cores < 1 or not self.contention >= 1:
            raise ConfigError(
                f"host: expected at least 1 core and a contention of at least 1, got {self.cores} and "
                f"{self.contention:g}",
                field="host",
            )

    def stretch(self, computing: int) -> float:
        """How many times as long a step lasts while so many ranks compute, its own among them. On a straight line to
        `contention`; beyond the cores they take turns."""
        others = min(computing, self.cores) - 1
        share = others / (self.cores - 1) if others > 0 else 0.0
        return (1 + (self.contention - 1) * share) * max(1.0, computing / self.cores)


@dataclass(slots=True)
class _Step:
    ranks: int
    left_s: float  # with a core for each rank, and nobody else
    done: Callable[[], None]


class BusyCores:
    """The steps that run on a host just now, each as much slower as there are others at each moment."""

    def __init__(self, host: HostCores, loop: EventLoop) -> None:
        self._host, self._loop = host, loop
        self._steps: dict[object, _Step] = {}
        self._since_s, self._stretch = loop.now_s(), 1.0
        self._generation = 0  # of the planned end; an older one means nothing

    def run(self, worker: object, ranks: int, seconds: float, done: Callable[[], None]) -> None:
        """`worker` begins a step that takes `seconds` by itself; `done` is called at its end."""
        self._advance()
        self._steps[worker] = _Step(ranks, seconds, done)
        self._plan()

    def stop(self, worker: object) -> None:
        """It is lost; nothing is called."""
        self._advance()
        self._steps.pop(worker, None)
        self._plan()

    def _advance(self) -> None:
        now_s = self._loop.now_s()
        for step in self._steps.values():
            step.left_s -= (now_s - self._since_s) / self._stretch
        self._since_s = now_s

    def _plan(self) -> None:
        self._generation += 1
        if self._steps:
            self._stretch = self._host.stretch(sum(step.ranks for step in self._steps.values()))
            left_s = max(0.0, min(step.left_s for step in self._steps.values()))
            self._loop.at(self._since_s + left_s * self._stretch, self._end, self._generation)

    def _end(self, generation: int) -> None:
        """Of the step that has least left."""
        if generation != self._generation:
            return
        self._advance()
        worker, step = min(self._steps.items(), key=lambda item: item[1].left_s)
        del self._steps[worker]
        self._plan()
        step.done()
