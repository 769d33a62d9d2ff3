"""What must be done to give a model's pools another size. Pure: the controller does it.

Role changes first: they cost nothing but a word in the directory, and the worker keeps its weights and its cache. Then
new workers, so that there is never less than there must be, and at last workers that leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.spec import Role
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as it is now. `busy`: requests on it; who has the fewest goes first."""

    worker_id: str
    role: Role
    busy: int = 0


@dataclass(frozen=True, slots=True)
class ChangeRole:
    worker_id: str
    role: Role

    def __str__(self) -> str:
        return f"{self.worker_id} becomes a {self.role.value} worker"


@dataclass(frozen=True, slots=True)
class Start:
    role: Role
    worker_id: str

    def __str__(self) -> str:
        return f"{self.worker_id} starts"


@dataclass(frozen=True, slots=True)
class Leave:
    worker_id: str

    def __str__(self) -> str:
        return f"{self.worker_id} leaves"


Action = ChangeRole | Start | Leave


def check_targets(prefill: int, decode: int, most: int = 4096) -> None:
    """Raises ConfigError naming the field."""
    if not 0 <= prefill <= most:
        raise ConfigError(f"prefill: expected 0 to {most} workers, got {prefill}", field="prefill")
    if not 1 <= decode <= most:
        raise ConfigError(
            f"decode: expected 1 to {most} workers (zero prefill workers make the cluster aggregated), got {decode}",
            field="decode",
        )


def ratio_split(prefill: int, decode: int, workers: int) -> tuple[int, int]:
    """So many workers in about this ratio, at least one of each that is asked for.

    Raises:
        ConfigError: there are too few workers for it.
    """
    if prefill < 0 or decode < 1:
        raise ConfigError(f"ratio: expected P:D with D at least 1, got {prefill}:{decode}", field="ratio")
    least = (1 if prefill else 0) + 1
    if workers < least:
        raise ConfigError(
            f"ratio: {prefill}:{decode} needs at least {least} workers, there are {workers}", field="ratio"
        )
    wanted = round(workers * prefill / (prefill + decode))
    chosen = max(1 if prefill else 0, min(workers - 1, wanted))
    return chosen, workers - chosen


def plan_change(
    members: Sequence[Member], prefill: int, decode: int, *, same_width: bool, name_of: str
) -> tuple[Action, ...]:
    """What leads from `members` to so many of each role, in order.

    Args:
        same_width: both pools have the same tensor-parallel width, so a worker can change its role.
        name_of: worker ids are `{name_of}{role}-{number}`.
    """
    check_targets(prefill, decode)
    targets = {Role.PREFILL: prefill, Role.DECODE: decode}
    by_role = {role: sorted(_of(members, role), key=_goes_first) for role in targets}
    actions: list[Action] = []
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        while same_width and len(by_role[role]) < targets[role] and len(by_role[other]) > targets[other]:
            changed = by_role[other].pop(0)
            by_role[role].append(Member(changed.worker_id, role, changed.busy))
            actions.append(ChangeRole(changed.worker_id, role))
    taken = {member.worker_id for member in members}
    for role, target in targets.items():
        for _ in range(target - len(by_role[role])):
            worker_id = _free_name(name_of, role, taken)
            taken.add(worker_id)
            actions.append(Start(role, worker_id))
    for role, target in targets.items():
        actions += [Leave(member.worker_id) for member in by_role[role][: max(0, len(by_role[role]) - target)]]
    return tuple(actions)


def _of(members: Sequence[Member], role: Role) -> list[Member]:
    return [member for member in members if member.role is role]


def _goes_first(member: Member) -> tuple[int, int, str]:
    """The least busy; among equals the one with the highest number, so that the first stay longest."""
    number = member.worker_id.rpartition("-")[2]
    return member.busy, -int(number) if number.isdigit() else 0, member.worker_id


def _free_name(name_of: str, role: Role, taken: set[str]) -> str:
    number = 0
    while (name := f"{name_of}{role.value}-{number}") in taken:
        number += 1
    return name
