"""Generated values: what renders is what Kubernetes, KubeRay and the cluster spec take, and a refusal names a value.

Each draw is a working base with a few changes, which hypothesis reduces to the fewest that fail."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.deploy.conftest import CHART, parse
from tests.unit.deploy.test_chart_value_sets import check

Change = tuple[str, Any]  # a path of keys, and the value there

NAMED_VALUE = re.compile(r": [a-z]\w*(\.\w+|\[\d+\])*: expected |at '/\w+[^']*': ")
EXTERNAL: Change = ("redis", {"mode": "external", "external": {"existingSecret": "r"}})
SECURE_VALKEY: Change = (
    "redis",
    {"mode": "valkey", "valkey": {"auth": {"existingSecret": "v"}, "tls": {"existingSecret": "t"}}},
)
ROOM: Change = ("node.resources", {"requests": {"cpu": "64"}, "limits": {"memory": "512Gi"}})
PLAIN: Change = ("cluster.security.allow_plaintext", True)
MTLS: Change = ("tls.internal.existingSecret", "certs")
GPUS: tuple[Change, ...] = (("cluster.models.0.engine.device", "cuda"), ("node.gpus", 8))
ISSUED: Change = ("tls.internal.certManager", {"enabled": True, "issuerRef": {"name": "ca", "kind": "Issuer"}})
JWT = {"issuer": "https://i.example", "audience": "llm"}
SLO = {"name": "chat", "ttft_slo_s": 2}

BASES: dict[str, tuple[Change, ...]] = {
    "one pod": (ROOM,),
    "one pod of GPUs": (ROOM, *GPUS),
    "several pods in plain text": (ROOM, EXTERNAL, PLAIN, ("node.replicas", 2)),
    "several pods with TLS": (ROOM, SECURE_VALKEY, MTLS, ("node.replicas", 2)),
    "several pods of GPUs": (ROOM, EXTERNAL, PLAIN, *GPUS, ("node.replicas", 2)),
    "router pods with TLS": (ROOM, SECURE_VALKEY, ISSUED, ("routers.replicas", 2)),
}

CHANGES: tuple[Change, ...] = (
    MTLS,
    ISSUED,
    PLAIN,
    EXTERNAL,
    SECURE_VALKEY,
    *GPUS,
    ("tls.internal.certManager.csi", True),
    ("tls.internal.nodeSecret", "n"),
    ("tls.internal.routerSecret", "r"),
    ("tls.edge.existingSecret", "edge"),
    ("tls.edge.certManager", {"enabled": True, "issuerRef": {"name": "ca", "kind": "StepIssuer"}}),
    ("cluster.security.allow_plaintext", False),
    *(("cluster.transfer.transport", each) for each in ("mapped", "tcp", "nccl", "nixl", "process_group")),
    ("cluster.transfer.wire_dtype", "int8"),
    ("node.rdma.resource", "rdma/hca"),
    ("redis", {"mode": "valkey", "valkey": {"auth": {"existingSecret": "v"}}}),
    ("redis", {"mode": "embedded"}),
    ("ray.gcsFaultTolerance", {"enabled": True, "existingSecret": "r"}),
    ("ray.gcsFaultTolerance", {"enabled": True, "existingSecret": "r", "address": "redis://redis:6379"}),
    ("ray.autoscaling.enabled", True),
    ("routers.replicas", 2),
    ("routers.autoscaling.enabled", True),
    ("cluster.router.replicas", 2),
    ("node.onHead", False),
    ("node.replicas", 3),
    ("node.roles", ["decode"]),
    ("nodeGroups", [{"name": "a", "replicas": 1, "roles": ["prefill"]}]),
    ("nodeGroups", [{"name": "a", "replicas": 2, "gpus": 2}]),
    ("upgrade.strategy", "rolling"),
    ("auth.existingSecret", "keys"),
    ("test.apiKeySecret.name", "smoke"),
    ("service.type", "LoadBalancer"),
    ("cluster.security.auth.mode", "none"),
    ("cluster.security.auth.mode", "required"),
    ("cluster.security.auth.api_key_sha256", "a" * 64),
    ("cluster.security.auth.jwt", JWT),
    ("cluster.security.auth.jwt", {**JWT, "jwks_url": "https://i.example/keys"}),
    ("cluster.security.auth.jwt", {**JWT, "jwks_url": "http://i.example/keys"}),
    ("cluster.security.auth.jwt", {**JWT, "jwks_url": "https://i.example/keys", "jwks_file": "/keys"}),
    ("cluster.security.auth.audit_log", "stdout"),
    ("cluster.security.auth.audit_log", "/tmp/audit.jsonl"),
    ("cluster.security.auth.audit_lossless", True),
    ("cluster.security.auth.audit_chained", True),
    ("cluster.security.auth.audit_key_file", "/etc/tandem-keys/audit.key"),
    ("cluster.observability.logs.target", "files"),
    ("cluster.observability.tracing.otlp_endpoint", "http://otel:4317"),
    ("cluster.observability.tracing.otlp_endpoint", "https://otel:4317"),
    ("cluster.observability.tracing.tls", {"ca": "/ca"}),
    ("cluster.observability.tracing.tls", {"cert": "/cert"}),
    ("cluster.autoscaler.enabled", True),
    ("cluster.autoscaler.max_workers", 1),
    ("cluster.autoscaler.max_workers", 4),
    ("cluster.autoscaler.min_workers", 3),
    ("cluster.autoscaler.prefill", {"min": 2, "max": 1}),
    ("cluster.autoscaler.prefill", {"min": 2}),
    ("cluster.autoscaler.decode", {"min": 0}),
    ("cluster.autoscaler.decode", {"max": 0}),
    ("cluster.router.classes", [{"name": "a"}]),
    ("cluster.router.classes", [SLO, {"name": "bulk", "batch": True}]),
    ("cluster.router.classes", [SLO, SLO]),
    ("cluster.router.classes", [{**SLO, "batch": True}]),
    ("cluster.control.devices", [0]),
    ("cluster.models.0.engine.device", "cuda:1"),
    ("cluster.models.0.engine.device_share", 0.4),
    ("cluster.models.0.engine.weights", "int8"),
    ("cluster.models.0.decode.engine", {"device": "cpu"}),
    ("cluster.models.0.decode.workers", 0),
    ("cluster.models.0.decode.tp", 2),
    ("cluster.models.0.prefill.workers", 0),
    ("cluster.models.0.prefill.node_groups", ["a"]),
    ("cluster.models.0.colocate", "require"),
    ("cluster.models.0.name", "b"),
    ("cluster.models.1", {"name": "b"}),
    ("cluster.models.1", {}),
    ("cluster.models.0.source", "s3://bucket/model"),
    ("cluster.models.0.source", "org/llama-70b"),
    ("cluster.models.0.source", "/models/llama-8b"),
    ("models.existingClaim", "weights"),
    ("models.image.reference", "registry.example/llama:1"),
    ("models.pull", False),
    ("networkPolicy.enabled", False),
    ("podSecurityContext.fsGroup", None),
)


def put(values: dict[str, Any], change: Change) -> None:
    """Sets a value; a number is the place of a model."""
    path, value = change
    *parents, last = keys = path.split(".")
    at: Any = values
    for part, following in zip(parents, keys[1:], strict=True):
        if isinstance(at, list):
            at = at[int(part)]
        else:
            at = at.setdefault(part, [{"source": "smollm2-135m"}] if following.isdecimal() else {})
    if not isinstance(at, list):
        at[last] = copy.deepcopy(value)
    elif int(last) < len(at):
        at[int(last)] = copy.deepcopy(value)
    else:
        at.append(copy.deepcopy(value))


@pytest.mark.slow
def test_what_renders_is_what_all_sides_take_and_a_refusal_names_a_value(helm: str) -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=90, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        base=st.sampled_from(sorted(BASES)),
        changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4, unique_by=lambda change: change[0]),
    )
    def draw(base: str, changes: list[Change]) -> None:
        values: dict[str, Any] = {}
        for change in (*BASES[base], *changes):
            put(values, change)
        command = [helm, "template", "test", str(CHART), "--namespace", "serving", "--values", "-"]
        done = subprocess.run(command, input=json.dumps(values), check=False, capture_output=True, text=True)
        outcomes["rendered" if done.returncode == 0 else "refused"] += 1
        if done.returncode == 0:
            check(parse(done.stdout))
        else:
            assert NAMED_VALUE.search(done.stderr), done.stderr

    draw()
    assert min(outcomes["rendered"], outcomes["refused"]) > 15, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_each_change_alone_renders_or_names_a_value(helm: str, number: int) -> None:
    """So that no change of the draws above is misspelt: nothing is refused as an unknown key."""
    values: dict[str, Any] = {}
    for change in (*BASES["one pod"], CHANGES[number]):
        put(values, change)
    command = [helm, "template", "test", str(CHART), "--namespace", "serving", "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), check=False, capture_output=True, text=True)
    assert "additional properties" not in done.stderr
    if done.returncode == 0:
        check(parse(done.stdout))
    else:
        assert NAMED_VALUE.search(done.stderr), done.stderr
