"""The engine of a role: the model's, and on top of it what the role's pool sets."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.spec.loader import load_spec
from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec, PoolSpec, Role
from tandem.errors import ConfigError


def model(**tree: Any) -> ModelSpec:
    return ModelSpec.model_validate(tree)


def test_a_role_overrides_single_fields() -> None:
    spec = model(engine={"dtype": "bfloat16", "kv_blocks": 64}, prefill={"engine": {"kv_blocks": 32, "device": "cuda"}})
    assert spec.engine_of(Role.PREFILL) == EngineSpec(dtype="bfloat16", kv_blocks=32, device="cuda")
    assert spec.engine_of(Role.DECODE) == spec.engine


def test_every_field_of_the_engine_can_be_set_for_a_role() -> None:
    overrides = type(PoolSpec().engine).model_fields
    assert list(overrides) == list(EngineSpec.model_fields)
    assert all(field.default is None for field in overrides.values())


def test_a_spec_survives_the_launch_file() -> None:
    spec = model(engine={"dtype": "bfloat16"}, decode={"engine": {"max_step_tokens": 64}})
    again = ModelSpec.model_validate_json(spec.model_dump_json())
    assert (again, again.engine_of(Role.DECODE)) == (spec, spec.engine_of(Role.DECODE))


@pytest.mark.parametrize(
    ("tree", "can_change"),
    [
        ({}, True),
        ({"prefill": {"engine": {"dtype": "float32"}}}, True),  # as the default
        ({"prefill": {"tp": 2}}, False),
        ({"prefill": {"engine": {"kv_blocks": 64}}}, False),
        ({"prefill": {"engine": {"kv_blocks": 64}}, "decode": {"engine": {"kv_blocks": 64}}}, True),
    ],
)
def test_workers_change_roles_if_engines_and_widths_agree(tree: dict[str, Any], can_change: bool) -> None:
    assert model(**tree).can_change_roles is can_change


def test_a_field_is_named_where_it_is_set() -> None:
    spec = model(prefill={"engine": {"dtype": "float16"}})
    assert spec.engine_field(Role.PREFILL, "dtype") == "prefill.engine.dtype"
    assert spec.engine_field(Role.DECODE, "dtype") == spec.engine_field(Role.PREFILL, "dtype").removeprefix("prefill.")


def test_the_environment_and_flags_reach_a_roles_engine() -> None:
    environ = {"TANDEM_MODELS__0__PREFILL__ENGINE__DTYPE": "bfloat16"}
    (spec,) = load_spec(None, {"models.0.decode.engine.kv_blocks": 16}, environ).models
    assert (spec.engine_of(Role.PREFILL).dtype, spec.engine_of(Role.DECODE).dtype) == ("bfloat16", "float32")
    assert (spec.engine_of(Role.PREFILL).kv_blocks, spec.engine_of(Role.DECODE).kv_blocks) == (None, 16)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("dtyp", "float32", r"prefill\.engine\.dtyp: expected a known field .*; did you mean dtype\?"),
        ("device", "gpu", r"prefill\.engine\.device: expected it to match"),
        ("block_tokens", 17, r"prefill\.engine\.block_tokens: expected 8, 16"),
    ],
)
def test_a_wrong_override_is_named(field: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_spec(None, {f"models.0.prefill.engine.{field}": value}, {})
