"""Flags win over environment over file over defaults; whatever is wrong has a line that names the field."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.up import UpFlags
from cluster.spec.loader import assignments, load_spec
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load_spec(environ={}) == ClusterSpec()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "router: {http_port: 1, grpc_port: 2}\ncontrol: {admin_port: 3}\n")
    environ = {"TANDEM_ROUTER__GRPC_PORT": "20", "TANDEM_CONTROL__ADMIN_PORT": "30"}
    spec = load_spec(path, {"control.admin_port": 300, "router.http_port": None}, environ)
    assert (spec.router.http_port, spec.router.grpc_port, spec.control.admin_port) == (1, 20, 300)


def test_places_in_lists_are_numbers() -> None:
    spec = load_spec(None, {"models.0.prefill.workers": 2}, {"TANDEM_MODELS__0__SOURCE": "somewhere/model"})
    assert (spec.models[0].prefill.workers, spec.models[0].served_name) == (2, "model")


def test_other_variables_of_ours_are_not_the_specs() -> None:
    assert load_spec(environ={"TANDEM_CACHE": "/somewhere"}) == ClusterSpec()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("rooter: {}", "rooter"),
        ("router: {http_port: eighty}", "router.http_port"),
        ("router: {http_port: 70000}", "router.http_port"),
        ("models: [{decode: {workers: 0}}]", "decode.workers"),
        ("models: [{source: 's3://bucket/model'}]", "models.0: source: expected the name of a pulled model"),
        ("models: []", "models"),
        ("redis: {mode: external}", "redis.url"),
        ("transfer: {tls: {cert: c.pem, key: k.pem}}", "transfer.tls.ca"),
        ("transfer: {transport: process_group, tls: {cert: c, key: k, ca: a}}", "transfer.transport"),
        ("transfer: {transport: nixl, tls: {cert: c, key: k, ca: a}}", "transfer.transport"),
        ("transfer: {transport: carrier_pigeon}", "transfer.transport"),
        ("[1, 2]", "--config"),
        ("a: [", "--config"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(write(tmp_path, text), environ={})
    assert field in refused.value.message
    assert "\n" not in refused.value.message


def test_every_mistake_has_a_line_and_none_is_counted_twice(tmp_path: Path) -> None:
    text = "router: {http_prt: 3, grpc_port: 99999}\nmodels: [{prefil: {workers: 2}}]"
    with pytest.raises(ConfigError) as refused:
        load_spec(write(tmp_path, text), environ={})
    assert sorted(refused.value.message.splitlines()) == [
        "models.0.prefil: expected a known field (docs/configuration.md lists them); did you mean prefill?",
        "router.grpc_port: expected less than or equal to 65535, got 99999",
        "router.http_prt: expected a known field (docs/configuration.md lists them); did you mean http_port?",
    ]


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "environ", "field"),
    [
        (f"security: {{auth: {{api_key_sha256: {SECRET}}}}}", {}, "security.auth.api_key_sha256"),
        (f"security: {{auth: {SECRET}}}", {}, "security.auth"),
        (f"security: [{SECRET}]", {}, "security"),
        (f"redis: {{mode: external, url: ['redis://:{SECRET}@host']}}", {}, "redis.url"),
        (f"observability: {{tracing: {{otlp_endpoint: 'grpc://me:{SECRET}@host'}}}}", {}, "tracing.otlp_endpoint"),
        (
            f"observability: {{tracing: {{otlp_endpoint: 'http://me:{SECRET}@host', tls: {{}}}}}}",
            {},
            "https:// otlp_endpoint, got http",
        ),
        (f"models: [{{engine: {{vllm: {{hf_token: [[{SECRET}]]}}}}}}]", {}, "vllm"),
        ("", {"TANDEM_REDIS__URL": f"[{SECRET}"}, "TANDEM_REDIS__URL"),
        (f"redis: {{url: {SECRET}}}", {"TANDEM_REDIS__URL__X": "1"}, "TANDEM_REDIS__URL__X"),
        (f"redis: {{url: [{SECRET}", {}, "line 1, column"),
    ],
)
def test_no_mistake_repeats_a_secret(tmp_path: Path, text: str, environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(write(tmp_path, text), environ=environ)
    assert field in refused.value.message
    assert SECRET not in refused.value.message


def test_values_of_the_chart_are_known_by_their_shape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got values of the Helm chart: use the part below `cluster`"):
        load_spec(write(tmp_path, "cluster: {name: x}\nnode: {gpus: 8}"), environ={})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_spec(tmp_path / "nowhere.yaml")


def test_any_key_can_be_set_on_the_command_line() -> None:
    flags = assignments(["models.0.prefill.engine.dtype=bfloat16", "control.devices=[0, 1]", "router.http_port=0"])
    assert flags == {"models.0.prefill.engine.dtype": "bfloat16", "control.devices": [0, 1], "router.http_port": 0}
    (model,) = load_spec(None, {"models.0.prefill.engine.dtype": "bfloat16"}, {}).models
    assert model.engine_of(Role.PREFILL).dtype == "bfloat16"


@pytest.mark.parametrize("text", ["dtype", "=1", "a=[", ""])
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set: expected"):
        assignments([text])


def test_the_commands_options_override_settings() -> None:
    nothing: dict[str, Any] = {each.name: None for each in fields(UpFlags)}
    settings = ("models.0.prefill.workers=3", "models.0.decode.workers=3")
    given = UpFlags(**nothing | {"settings": settings})
    assert given.source().spec.models[0].decode.workers == 3
    (model,) = replace(given, prefill=2).source().spec.models
    assert (model.prefill.workers, model.decode.workers) == (2, 3)
