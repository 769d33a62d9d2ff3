"""Rules of the cluster spec between several keys, which no schema says: the chart refuses what the spec refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tandem.config.spec import ClusterSpec
from tests.unit.deploy.test_chart import cluster_spec

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]

JWT = {"issuer": "https://i.example", "audience": "llm"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("autoscaler", {"min_workers": 2, "max_workers": 1}, "autoscaler.max_workers: expected at least min_workers"),
        ("autoscaler", {"decode": {"min": 0}}, "autoscaler.decode.min: expected at least 1, got 0"),
        ("autoscaler", {"prefill": {"min": 3, "max": 1}}, "autoscaler.prefill.max: expected at least min (3), got 1"),
        (
            "autoscaler",
            {"max_workers": 3, "prefill": {"min": 3}},
            "autoscaler.max_workers: expected at least prefill.min",
        ),
        ("router", {"classes": [{"name": "a"}, {"name": "a"}]}, "router.classes[1].name: expected different names"),
        ("control", {"devices": [0]}, "control.devices: expected none"),
        ("models", [{}, {}], "models[1].name: expected a name that no other model has, got smollm2-135m"),
        ("models", [{"decode": {"workers": 0}}], "models[0].decode.workers: expected at least 1"),
        ("models", [{"engine": {"device_share": 0.5}}], "models[0].engine.device_share: expected 1 with device cpu"),
        ("models", [{"engine": {"batching": "static"}}], "models[0].engine.batching: expected continuous with prefill"),
        (
            "models",
            [{"decode": {"engine": {"batching": "dynamic"}}}],
            "models[0].decode.engine.batching: expected continuous with prefill workers, got dynamic",
        ),
        (
            "models",
            [{"engine": {"batching_window_s": 0.5}}],
            "models[0].engine.batching_window_s: expected none with batching continuous",
        ),
        (
            "models",
            [
                {
                    "engine": {"batching_window_s": 0.5},
                    "prefill": {"workers": 0, "engine": {"batching": "static"}},
                    "decode": {"engine": {"batching": "static"}},
                }
            ],
            "models[0].engine.batching_window_s: expected none with batching continuous",
        ),
        (
            "models",
            [
                {
                    "engine": {"batching": "static", "batching_window_s": 0.5},
                    "prefill": {"workers": 0},
                    "decode": {"engine": {"batching": "continuous"}},
                }
            ],
            "models[0].decode.engine.batching_window_s: expected none with batching continuous",
        ),
        ("observability", {"tracing": {"tls": {}}}, "observability.tracing.tls: expected an https:// otlp_endpoint"),
        (
            "observability",
            {"tracing": {"otlp_endpoint": "https://o:4317", "tls": {"cert": "c"}}},
            "observability.tracing.tls.key: expected together with tls.cert",
        ),
        ("security", {"auth": {"mode": "required"}}, "security.auth.mode: expected auth.existingSecret"),
        ("security", {"auth": {"mode": "none", "api_key_sha256": "a" * 64}}, "security.auth.mode: expected required"),
        ("security", {"auth": {"audit_lossless": True}}, "security.auth.audit_lossless: expected a file as"),
        ("security", {"auth": {"audit_key_file": "k"}}, "security.auth.audit_key_file: expected together with"),
        ("security", {"auth": {"jwt": JWT}}, "security.auth.jwt.jwks_file: expected exactly one of"),
        (
            "security",
            {"auth": {"jwt": {**JWT, "jwks_url": "http://i.example"}}},
            "security.auth.jwt.jwks_url: expected an https URL (http only on loopback), got http://i.example",
        ),
    ],
)
def test_what_the_spec_refuses_between_keys_is_refused_before_anything_is_applied(
    refusal: Callable[..., str], path: str, value: object, message: str
) -> None:
    """The spec refuses it too: these are its rules."""
    room = "node.resources.requests.cpu=8"
    assert f"cluster.{message}" in refusal("--set", room, "--set-json", f"cluster.{path}={json.dumps(value)}")
    with pytest.raises(ValidationError):
        ClusterSpec.model_validate({"control": {"backend": "ray", "ray_address": "auto"}} | {path: value})


def test_an_audit_log_is_no_authentication(render: Render) -> None:
    auth = cluster_spec(render("--set", "cluster.security.auth.audit_log=stdout")).security.auth
    assert (auth.audit_log, auth.required) == ("stdout", False)
    files = "cluster.observability.logs.target=files"
    key = "a" * 64
    exposed = render("--set", f"service.type=LoadBalancer,cluster.security.auth.api_key_sha256={key},{files}")
    assert cluster_spec(exposed).security.auth.required
