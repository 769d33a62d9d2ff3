"""On which nodes the workers of a model may be."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.spec.loader import load_spec
from tandem.config.model import Role
from tandem.errors import ConfigError

RAY = {"control.ray_address": "127.0.0.1:6379"}


def pools(prefill: list[str], decode: list[str], **model: Any) -> dict[str, Any]:
    groups = {"models.0.prefill.node_groups": prefill, "models.0.decode.node_groups": decode}
    return RAY | groups | {f"models.0.{name}": value for name, value in model.items()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            pools(["h100"], []) | {"control.ray_address": None},
            "prefill.node_groups: expected none without control.backend",
        ),
        (pools(["h100"], ["h200"], colocate="require"), "colocate: expected prefer or no, because prefill.node_groups"),
        (pools([], [], colocate="require") | {"models.0.prefill.workers": 0}, "colocate: expected prefer or no with"),
        (pools([], [], colocate="always"), "models.0.colocate"),
        (pools(["H100,H200"], []), "models.0.prefill.node_groups.0"),  # a label selector would read two
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(None, flags, {})
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("prefill", "decode", "can_change", "on_b"),
    [
        ([], [], True, {*Role}),
        (["a", "b"], [], True, {*Role}),
        (["a", "b"], ["b", "c"], True, {*Role}),
        (["a"], ["b"], False, {Role.DECODE}),
        (["a"], [], True, {Role.DECODE}),
    ],
)
def test_a_worker_changes_roles_where_its_nodes_group_allows_both(
    prefill: list[str], decode: list[str], can_change: bool, on_b: set[Role]
) -> None:
    (model,) = load_spec(None, pools(prefill, decode), {}).models
    assert (model.can_change_roles, {*model.roles_on("b")}) == (can_change, on_b)
