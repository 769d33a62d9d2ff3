"""The cores of a host that several workers share: a step takes longer while others compute.

Routers, services, agents and clients compute there too: a little for each request, token and handoff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from tandem.errors import ConfigError


class VirtualTime(Protocol):
    """The part of the simulator's event loop that is used here."""

    def now_s(self) -> float: ...

    def call_at(self, at_s: float, callback: Callable[..., None], *args: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Contention:
    """Factors on a step's time while all other cores compute, because they share caches and memory bandwidth: by what
    the step computes, and what they do. Decoding reads all weights for few tokens, so it disturbs and suffers most."""

    prompts_beside_prompts: float = 1.0
    prompts_beside_decoding: float = 1.0
    decoding_beside_prompts: float = 1.0
    decoding_beside_decoding: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 1:
                raise ConfigError(f"host: contention: {name}: expected at least 1, got {value:g}", field="host")

    @property
    def most(self) -> float:
        factors: list[float] = [*asdict(self).values()]
        return max(factors)

    def of(self, decoding: float, others: float) -> float:
        """Of a step that decodes for a share `decoding` of its time, while others do for a share `others`."""
        prompts_s = self.prompts_beside_prompts * (1 - others) + self.prompts_beside_decoding * others
        decoding_s = self.decoding_beside_prompts * (1 - others) + self.decoding_beside_decoding * others
        return prompts_s * (1 - decoding) + decoding_s * decoding


@dataclass(frozen=True, slots=True)
class HostCores:
    """`cores`: ranks that can compute at a time; half of the host's cores if a rank has two threads.
    `request_s`, `frame_s`, `token_s`, `handoff_s`, `kv_byte_s`: what all other processes, clients included, compute for
    a request, the frame in which a step's tokens leave, each of them, a handoff, and a byte of KV in it. `idle_cores`:
    what they use of the cores without requests. `tandem profile` measures them."""

    cores: int
    contention: Contention = Contention()
    request_s: float = 0.0
    frame_s: float = 0.0
    token_s: float = 0.0
    handoff_s: float = 0.0
    kv_byte_s: float = 0.0
    idle_cores: float = 0.0

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ConfigError(f"host: cores: expected at least 1, got {self.cores}", field="host")
        if not 0 <= self.idle_cores < 0.9 * self.cores:
            raise ConfigError(f"host: idle_cores: expected fewer than the cores, got {self.idle_cores}", field="host")
        for name in ("request_s", "frame_s", "token_s", "handoff_s", "kv_byte_s"):
            if not 0 <= (value := getattr(self, name)) < 60:
                raise ConfigError(f"host: {name}: expected seconds from 0, got {value}", field="host")

    def stretch(self, computing: int, decoding: float = 0.0, others_decoding: float = 0.0) -> float:
        """Factor on a step's time while `computing` ranks compute, its own included; shares as in `Contention.of`.
        Linear up to the contention; more ranks than cores share the cores evenly."""
        beside = min(computing, self.cores) - 1
        share = beside / (self.cores - 1) if beside > 0 else 0.0
        turns = max(1.0, computing / (self.cores - self.idle_cores))
        return (1 + (self.contention.of(decoding, others_decoding) - 1) * share) * turns


@dataclass(slots=True)
class _Step:
    ranks: int
    left_s: float  # with a core for each rank and no other load
    done: Callable[[], None]
    decoding: float  # for this share of its time
    stretch: float = 1.0  # at present


class BusyCores:
    """The steps running on a host at present, each slowed down by the number of others at every moment."""

    def __init__(self, host: HostCores, loop: VirtualTime) -> None:
        self._host, self._loop = host, loop
        self._steps: dict[object, _Step] = {}
        self._since_s = loop.now_s()
        self._generation = 0  # of the scheduled end; older events are ignored

    def run(self, worker: object, ranks: int, seconds: float, done: Callable[[], None], decoding: float = 0.0) -> None:
        """Starts a step of `worker` that takes `seconds` on an idle host, and calls `done` at its end. `decoding`: the
        share of its time in which it decodes."""
        self._advance()
        self._steps[worker] = _Step(ranks, seconds, done, decoding)
        self._schedule_end()

    def spend(self, seconds: float, done: Callable[[], None] = lambda: None) -> None:
        """What another process computes: at once, on one core."""
        if seconds > 0:
            self.run(object(), 1, seconds, done)
        else:
            done()

    @property
    def host(self) -> HostCores:
        return self._host

    def stop(self, worker: object) -> None:
        """Drops the step of a lost worker; its `done` is not called."""
        self._advance()
        self._steps.pop(worker, None)
        self._schedule_end()

    def _advance(self) -> None:
        now_s = self._loop.now_s()
        for step in self._steps.values():
            step.left_s -= (now_s - self._since_s) / step.stretch
        self._since_s = now_s

    def _schedule_end(self) -> None:
        self._generation += 1
        if self._steps:
            ranks = sum(step.ranks for step in self._steps.values())
            decoding = sum(step.ranks * step.decoding for step in self._steps.values())
            for step in self._steps.values():
                others = (decoding - step.decoding) / (ranks - 1) if ranks > 1 else 0.0
                step.stretch = self._host.stretch(ranks, step.decoding, others)
            left_s = max(0.0, min(step.left_s * step.stretch for step in self._steps.values()))
            self._loop.call_at(self._since_s + left_s, self._end, self._generation)

    def _end(self, generation: int) -> None:
        """Ends the step with the least time left."""
        if generation != self._generation:
            return
        self._advance()
        worker, step = min(self._steps.items(), key=lambda item: item[1].left_s * item[1].stretch)
        del self._steps[worker]
        self._schedule_end()
        step.done()
