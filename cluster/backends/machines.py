"""Which machine a worker goes to. Pure: `ray_nodes` knows the machines.

Prefill and decode workers of a model on one machine exchange KV through its memory or NVLink (`models[].colocate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.backends.protocol import Resources


@dataclass(frozen=True, slots=True)
class Machine:
    """`free`: as Ray counts it (CPU, GPU). `own` and `partners`: workers of the model there, of the same and of the
    other role."""

    node: str
    free: Mapping[str, float]
    own: int = 0
    partners: int = 0

    def has_room(self, *workers: Sequence[Resources]) -> bool:
        members = [each for worker in workers for each in worker]
        cpus, gpus = sum(each.cpus for each in members), sum(each.gpus for each in members)
        return cpus <= self.free.get("CPU", 0.0) + _ROUNDING and gpus <= self.free.get("GPU", 0.0) + _ROUNDING


_ROUNDING = 1e-4  # Ray counts in steps of it


def nearest(machines: Sequence[Machine], worker: Sequence[Resources], partner: Sequence[Resources]) -> str | None:
    """The machine with room and with partners, at best with partners alone; else one with room for a partner too; then
    the one with the least room, so that whole machines stay free. None: no machine has room."""
    fitting = [each for each in machines if each.has_room(worker)]
    best = min(fitting, key=lambda each: _order(each, worker, partner), default=None)
    return None if best is None else best.node


def beside_partner(
    machines: Sequence[Machine], worker: Sequence[Resources], partner: Sequence[Resources], partners_to_come: int
) -> str | None:
    """As `nearest`, but the machine has a partner, or room for one of those that are still to be placed and that no
    other machine waits for. None: there is no such machine now."""
    waiting = sum(each.own > 0 and each.partners == 0 for each in machines)
    may_wait = waiting < partners_to_come
    allowed = [
        each
        for each in machines
        if each.partners > 0 or ((each.own > 0 or may_wait) and partners_to_come > 0 and each.has_room(worker, partner))
    ]
    return nearest(allowed, worker, partner)


def _order(
    machine: Machine, worker: Sequence[Resources], partner: Sequence[Resources]
) -> tuple[bool, bool, int, float, float, str]:
    free = machine.free.get("GPU", 0.0), machine.free.get("CPU", 0.0), machine.node
    if machine.partners:
        return False, machine.own > 0, machine.own - machine.partners, *free  # partners alone wait for this worker
    return True, not machine.has_room(worker, partner), -machine.own, *free
