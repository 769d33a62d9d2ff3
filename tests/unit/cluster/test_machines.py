"""Which machine a worker goes to: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.backends.machines import Machine, beside_partner, nearest
from cluster.backends.protocol import Resources

RANK = Resources(cpus=1.0, gpus=1.0)


def machine(node: str, gpus: float, own: int = 0, partners: int = 0) -> Machine:
    return Machine(node, {"CPU": 64.0, "GPU": gpus}, own, partners)


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([machine("a", 8), machine("b", 4, partners=1)], "b"),
        ([machine("a", 8), machine("b", 1, partners=1)], "a"),  # no room there
        ([machine("a", 4, own=1, partners=1), machine("b", 4, partners=1)], "b"),  # whose partner has none beside it
        ([machine("a", 2), machine("b", 4)], "b"),  # a partner fits too
        ([machine("a", 8), machine("b", 4)], "b"),  # whole machines stay free
        ([machine("a", 1), machine("b", 1)], None),
        ([], None),
    ],
)
def test_a_worker_goes_to_its_partners_or_where_one_can_follow(machines: list[Machine], expected: str | None) -> None:
    assert nearest(machines, [RANK] * 2, [RANK] * 2) == expected


def test_a_worker_that_needs_a_partner_opens_a_machine_only_for_one_that_is_to_come() -> None:
    fresh, waiting, paired = machine("a", 4), machine("b", 2, own=1), machine("c", 2, own=1, partners=1)
    pair = [RANK], [RANK]
    assert beside_partner([fresh], *pair, 1) == "a"
    assert beside_partner([fresh], *pair, 0) is None
    assert beside_partner([fresh, waiting], *pair, 1) == "b"  # the one to come is waited for there
    assert beside_partner([fresh, replace(waiting, free={"CPU": 9.0, "GPU": 1.0})], *pair, 1) is None
    assert beside_partner([fresh, paired], *pair, 1) == "c"
    assert beside_partner([replace(fresh, free={"CPU": 9.0, "GPU": 1.0})], *pair, 1) is None  # no room for both


@settings(max_examples=1000)
@given(st.data())
def test_with_colocation_required_no_machine_ends_with_workers_of_one_role(data: st.DataObject) -> None:
    """In whatever order they come. One that no machine takes now may be taken later."""
    widths = {role: data.draw(st.integers(1, 4), label=role) for role in "pd"}
    coming = data.draw(st.lists(st.sampled_from("pd"), max_size=10), label="order")
    free = dict(enumerate(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=4), label="GPUs")))
    on: dict[int, list[str]] = {node: [] for node in free}
    waiting = list(coming)
    for _ in coming:
        for role in list(waiting):
            other = "d" if role == "p" else "p"
            machines = [machine(str(n), gpus, on[n].count(role), on[n].count(other)) for n, gpus in free.items()]
            ranks = {each: [RANK] * width for each, width in widths.items()}
            node = beside_partner(machines, ranks[role], ranks[other], waiting.count(other))
            if node is not None:
                waiting.remove(role)
                free[int(node)] -= widths[role]
                on[int(node)].append(role)
    assert all(gpus >= 0 for gpus in free.values())
    assert all(set(roles) in ({"p", "d"}, set()) for roles in on.values()), (on, waiting)
