"""Which changes of a spec a running cluster can take."""

from __future__ import annotations

import pytest

from cluster.spec.changes import SpecSource, changed_fields, is_live
from cluster.spec.loader import load_spec
from tandem.errors import ConfigError


def source(**flags: object) -> SpecSource:
    return SpecSource(load_spec(None, flags, {}), flags)


def test_sizes_of_pools_the_autoscaler_and_what_routers_do_can_change() -> None:
    running = source()
    spec = running.changed_by("models: [{prefill: {workers: 3}}]\nautoscaler: {enabled: true, decode: {max: 4}}")
    assert spec.models[0].prefill.workers == 3
    assert changed_fields(running.spec, spec) == [
        "models.0.prefill.workers", "autoscaler.enabled", "autoscaler.decode.max",
    ]  # fmt: skip
    assert all(is_live(field) for field in changed_fields(running.spec, spec))
    spec = running.changed_by("router: {classes: [{name: only}], max_queued_requests: 9, idempotency: {keep_s: 5}}")
    assert changed_fields(running.spec, spec) == [
        "router.max_queued_requests", "router.classes", "router.idempotency.keep_s",
    ]  # fmt: skip
    assert all(is_live(field) for field in changed_fields(running.spec, spec))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("router: {http_port: 8001}", "router.http_port"),
        ("models: [{prefill: {tp: 2}, engine: {dtype: bfloat16}}]", "models.0.prefill.tp, models.0.engine.dtype"),
        ("models: [{prefill: {engine: {dtype: bfloat16}}}]", "models.0.prefill.engine.dtype"),
        ("models: [{}, {name: second}]", "models"),
        ("router: {replicas: 2, classes: [{name: only}]}", "router.replicas"),
        ("models: [{decode: {workers: 2}}]\ncontrol: {drain_timeout_s: 9}", "control.drain_timeout_s"),
    ],
)
def test_other_changes_are_refused_by_their_fields(text: str, fields: str) -> None:
    with pytest.raises(ConfigError) as refused:
        source().changed_by(text)
    assert refused.value.message.startswith(f"{fields}: changing this needs a restart")
    assert refused.value.field == fields.partition(",")[0]


def test_flags_hold_but_for_what_the_file_says_of_sizes() -> None:
    running = source(**{"router.http_port": 0, "models.0.decode.workers": 3, "models.0.prefill.workers": 2})
    spec = running.changed_by("models: [{decode: {workers: 4}}]")
    assert (spec.router.http_port, spec.models[0].decode.workers, spec.models[0].prefill.workers) == (0, 4, 2)
    assert running.changed_by("") == running.spec


@pytest.mark.parametrize("text", ["[1]", "models: [", "models: [{decode: {workers: many}}]", "unknown: 1", "?"])
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        source().changed_by(text)
