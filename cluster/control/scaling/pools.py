"""Plans the steps that give a model's pools another size. Pure: `PoolScaler` carries them out.

Role changes come first: only the directory changes, and the worker keeps its weights and cache. New workers come next,
so that capacity never falls below the target, and removals last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.config.model import Role
from tandem.errors import ConfigError
from tandem.text.words import named_role


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A worker now. `busy` counts its requests: the worker with the fewest changes first. `may_change_role`: as far as
    the node where it is allows."""

    worker_id: str
    role: Role
    busy: int = 0
    may_change_role: bool = True


@dataclass(frozen=True, slots=True)
class ChangeRole:
    worker_id: str
    role: Role

    def __str__(self) -> str:
        return f"{self.worker_id} becomes a {self.role.value} worker"


@dataclass(frozen=True, slots=True)
class StartWorker:
    role: Role
    worker_id: str

    def __str__(self) -> str:
        return f"{self.worker_id} starts"


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    worker_id: str

    def __str__(self) -> str:
        return f"{self.worker_id} leaves"


PoolChange = ChangeRole | StartWorker | RemoveWorker


def check_targets(prefill: int, decode: int, limit: int = 4096) -> None:
    """Raises ConfigError naming the field."""
    if not 0 <= prefill <= limit:
        raise ConfigError(f"prefill: expected 0 to {limit} workers, got {prefill}", field="prefill")
    if not 1 <= decode <= limit:
        raise ConfigError(
            f"decode: expected 1 to {limit} workers (zero prefill workers make the cluster aggregated), got {decode}",
            field="decode",
        )


def ratio_split(prefill: int, decode: int, workers: int) -> tuple[int, int]:
    """Splits `workers` in about this ratio, with at least one worker of each role that the ratio names.

    Raises:
        ConfigError: the ratio is invalid, or there are too few workers for it.
    """
    if prefill < 0 or decode < 1:
        raise ConfigError(f"ratio: expected P:D with D at least 1, got {prefill}:{decode}", field="ratio")
    minimum = (1 if prefill else 0) + 1
    if workers < minimum:
        raise ConfigError(
            f"ratio: {prefill}:{decode} needs at least {minimum} workers, there are {workers}", field="ratio"
        )
    wanted = round(workers * prefill / (prefill + decode))
    chosen = max(1 if prefill else 0, min(workers - 1, wanted))
    return chosen, workers - chosen


def plan_change(
    members: Sequence[PoolMember],
    prefill: int,
    decode: int,
    *,
    can_change_roles: bool,
    name_prefix: str,
    taken_ids: Collection[str] = (),
) -> tuple[PoolChange, ...]:
    """The ordered changes that turn `members` into pools of `prefill` and `decode` workers.

    Args:
        can_change_roles: both roles have the same engine and tensor-parallel width. Without it, workers of one role
            stop and workers of the other start.
        name_prefix: worker ids are `{name_prefix}{role}-{number}`.
        taken_ids: of workers that are no members, such as those that were given up.
    """
    check_targets(prefill, decode)
    targets = {Role.PREFILL: prefill, Role.DECODE: decode}
    by_role = {role: sorted(_of(members, role), key=_change_order) for role in targets}
    actions: list[PoolChange] = []
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        changeable = [member for member in by_role[other] if can_change_roles and member.may_change_role]
        while changeable and len(by_role[role]) < targets[role] and len(by_role[other]) > targets[other]:
            changed = changeable.pop(0)
            by_role[other].remove(changed)
            by_role[role].append(PoolMember(changed.worker_id, role, changed.busy))
            actions.append(ChangeRole(changed.worker_id, role))
    taken = {member.worker_id for member in members}.union(taken_ids)
    for role, target in targets.items():
        for _ in range(target - len(by_role[role])):
            worker_id = _unused_id(name_prefix, role, taken)
            taken.add(worker_id)
            actions.append(StartWorker(role, worker_id))
    for role, target in targets.items():
        actions += [RemoveWorker(member.worker_id) for member in by_role[role][: max(0, len(by_role[role]) - target)]]
    return tuple(actions)


def _of(members: Sequence[PoolMember], role: Role) -> list[PoolMember]:
    return [member for member in members if member.role is role]


def _change_order(member: PoolMember) -> tuple[int, bool, int, str]:
    """Sort key: the least busy first; among equals one whose id names the other role, then the highest number, so that
    ids come to name the role again and low numbers stay."""
    number = member.worker_id.rpartition("-")[2]
    keeps_role = named_role(member.worker_id) in (member.role.value, None)
    return member.busy, keeps_role, -int(number) if number.isdigit() else 0, member.worker_id


def _unused_id(name_prefix: str, role: Role, taken: set[str]) -> str:
    number = 0
    while (name := f"{name_prefix}{role.value}-{number}") in taken:
        number += 1
    return name
