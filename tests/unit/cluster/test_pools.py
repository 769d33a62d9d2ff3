from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.commands.scaling import change_text
from cluster.control.scaling.pools import ChangeRole, PoolMember, RemoveWorker, StartWorker, plan_change, ratio_split
from tandem.config.model import Role
from tandem.errors import ConfigError

P, D = Role.PREFILL, Role.DECODE


def members(prefill: int, decode: int) -> list[PoolMember]:
    return [PoolMember(f"prefill-{n}", P) for n in range(prefill)] + [
        PoolMember(f"decode-{n}", D) for n in range(decode)
    ]


def test_roles_change_first_then_workers_start_and_at_last_they_leave() -> None:
    assert plan_change(members(1, 3), 3, 1, can_change_roles=True, name_prefix="") == (
        ChangeRole("decode-2", P),
        ChangeRole("decode-1", P),
    )
    assert plan_change(members(1, 1), 2, 2, can_change_roles=True, name_prefix="m-") == (
        StartWorker(P, "m-prefill-0"),
        StartWorker(D, "m-decode-0"),
    )
    assert plan_change(members(2, 1), 1, 1, can_change_roles=True, name_prefix="") == (RemoveWorker("prefill-1"),)


def test_the_id_of_a_worker_that_was_given_up_is_not_given_again() -> None:
    plan = plan_change(
        members(1, 1), 1, 2, can_change_roles=True, name_prefix="", taken_ids=("decode-0", "decode-1", "prefill-0")
    )
    assert plan == (StartWorker(D, "decode-2"),)


def test_workers_of_another_width_or_engine_do_not_change_their_role() -> None:
    assert plan_change(members(1, 2), 2, 1, can_change_roles=False, name_prefix="") == (
        StartWorker(P, "prefill-1"),
        RemoveWorker("decode-1"),
    )


def test_the_least_busy_goes_first() -> None:
    busy = [PoolMember("prefill-0", P), PoolMember("decode-0", D, 1), PoolMember("decode-1", D, 5)]
    assert plan_change(busy, 1, 1, can_change_roles=True, name_prefix="") == (RemoveWorker("decode-0"),)


def test_among_equals_a_worker_returns_to_the_role_that_its_id_names() -> None:
    changed = [
        PoolMember("prefill-0", P),
        PoolMember("prefill-1", D),
        PoolMember("decode-0", D),
        PoolMember("decode-1", D),
    ]
    assert plan_change(changed, 2, 2, can_change_roles=True, name_prefix="") == (ChangeRole("prefill-1", P),)
    busy = [PoolMember("prefill-1", D, 2), *changed[:1], *changed[2:]]
    assert plan_change(busy, 2, 2, can_change_roles=True, name_prefix="") == (ChangeRole("decode-1", P),)


def test_among_equals_a_worker_whose_id_names_the_other_role_leaves_first() -> None:
    changed = [PoolMember("prefill-0", D), PoolMember("decode-0", D), PoolMember("decode-1", D)]
    assert plan_change(changed, 0, 2, can_change_roles=True, name_prefix="") == (RemoveWorker("prefill-0"),)


def test_a_name_that_a_worker_of_the_other_role_kept_is_not_given_again() -> None:
    changed = [PoolMember("decode-1", P), PoolMember("decode-0", D)]
    assert plan_change(changed, 1, 2, can_change_roles=True, name_prefix="") == (StartWorker(D, "decode-2"),)


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.booleans())
def test_what_is_planned_leads_to_what_was_asked(p: int, d: int, to_p: int, to_d: int, can_change_roles: bool) -> None:
    roles = {member.worker_id: member.role for member in members(p, d)}
    for action in plan_change(members(p, d), to_p, to_d, can_change_roles=can_change_roles, name_prefix=""):
        match action:
            case ChangeRole(worker_id, role):
                roles[worker_id] = role
            case StartWorker(role, worker_id):
                assert worker_id not in roles
                roles[worker_id] = role
            case RemoveWorker(worker_id):
                del roles[worker_id]
        assert D in roles.values()
    assert sorted(roles.values()) == sorted([P] * to_p + [D] * to_d)


@pytest.mark.parametrize(
    ("ratio", "workers", "split"),
    [((2, 1), 3, (2, 1)), ((1, 1), 3, (2, 1)), ((1, 7), 4, (1, 3)), ((3, 1), 8, (6, 2)), ((0, 1), 2, (0, 2))],
)
def test_a_ratio_becomes_whole_workers(ratio: tuple[int, int], workers: int, split: tuple[int, int]) -> None:
    assert ratio_split(*ratio, workers) == split


@pytest.mark.parametrize(
    ("asked", "workers", "text"),
    [
        ((4, 2), 3, "3 workers: 1:2 becomes 2:1"),
        ((5, 1), 3, "3 workers: 1:2 becomes 2:1, the nearest to 5:1 that 3 workers allow"),
        ((0, 1), 3, "3 workers: 1:2 becomes 0:3"),
    ],
)
def test_a_ratio_that_is_not_possible_is_said_to_be_so(asked: tuple[int, int], workers: int, text: str) -> None:
    assert change_text(asked, ratio_split(*asked, workers), "1:2") == text


def test_what_cannot_be_is_refused_with_what_is_expected() -> None:
    with pytest.raises(ConfigError, match="decode: expected 1 to"):
        plan_change(members(1, 1), 1, 0, can_change_roles=True, name_prefix="")
    with pytest.raises(ConfigError, match="ratio: 1:1 needs at least 2 workers, there are 1"):
        ratio_split(1, 1, 1)
    with pytest.raises(ConfigError, match="ratio: expected P:D"):
        ratio_split(1, 0, 4)
