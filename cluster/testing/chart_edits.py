"""The kinds of edits that a platform team makes to the chart's values, and the pods that each replaces: the table in
docs/deploy.md, from real renders before and after."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from cluster.testing.kuberay import Manifests, Outcome, outcome, secret_outcome

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tandem"
EXAMPLE = CHART / "examples" / "router-pods.yaml"

GATEWAY = (
    "gateway.enabled=true,gateway.parentRefs[0].name=edge,gateway.hostnames[0]=a.example.com,"
    "gateway.backendTls.caConfigMap=ca"
)
IN_HEAD, RECREATE, ROLLING = "routers in the head pod", "router pods, `recreate`", "router pods, `rolling`"
BASES: Mapping[str, str] = {
    IN_HEAD: f"{GATEWAY},routers.autoscaling.enabled=false,upgrade.strategy=recreate",
    RECREATE: f"{GATEWAY},upgrade.strategy=recreate",
    ROLLING: GATEWAY,
}
WITH_ROUTER_PODS = (RECREATE, ROLLING)


@dataclass(frozen=True, slots=True)
class Edit:
    """A row of the table. `settings`: changes for `helm --set`; all have the outcome of the first. `given`: what the
    values have before and after. `bases`: those whose values can be edited so. `secrets`: instead of settings, Secrets
    whose contents change. `is_live`: it must restart nothing."""

    title: str
    settings: tuple[str, ...] = ()
    given: str = ""
    bases: Sequence[str] = tuple(BASES)
    secrets: tuple[str, ...] = ()
    is_live: bool = False

    def __str__(self) -> str:
        return self.title


def _under(value: str, settings: str) -> tuple[str, ...]:
    return tuple(f"{value}.{each}" for each in settings.split())


def _of_pod(value: str) -> tuple[str, ...]:
    """Settings of where and how its pods run. `head` has no spread."""
    rule = ("maxSkew=2", "topologyKey=rack", "whenUnsatisfiable=DoNotSchedule")
    spread = ",".join(f"{value}.topologySpreadConstraints[0].{each}" for each in rule)
    return (*_under(value, PLACED), *_under(f"{value}.pod", POD), *(() if value == "head" else (spread,)))


PLACED = "tolerations[0].key=a nodeSelector.a=b affinity.nodeAffinity.a=b resources.limits.memory=32Gi"
POD = (
    "labels.a=b annotations.a=b env[0].name=A envFrom[0].secretRef.name=a volumes[0].name=a initContainers[0].name=a "
    "containers[0].name=a priorityClassName=a schedulerName=a hostNetwork=true dnsPolicy=Default "
    "dnsConfig.searches[0]=a hostAliases[0].ip=10.0.0.1 resourceClaims[0].name=a"
)
VALKEY = "resources.limits.memory=1Gi existingClaim=a pod.env[0].name=A pod.labels.a=b pod.priorityClassName=a"
CPUS, MEMORY = "node.resources.requests.cpu=8", "node.resources.limits.memory=64Gi"
GROUP, OTHER_GROUP = (f"nodeGroups[{n}].name={name},nodeGroups[{n}].replicas=1" for n, name in enumerate("ab"))
AUTOSCALED = "ray.autoscaling.enabled=true,node.replicas=0,node.minReplicas=2"
SCALED = "scaleAdapter.enabled=true"
AUTOSCALER = (
    "scaleAdapter.autoscalers[0].role=decode,scaleAdapter.autoscalers[0].maxReplicas=1,"
    "scaleAdapter.autoscalers[0].metrics[0].type=External,"
    "scaleAdapter.autoscalers[0].metrics[0].external.metric.name=a,"
    "scaleAdapter.autoscalers[0].metrics[0].external.target.type=AverageValue,"
    "scaleAdapter.autoscalers[0].metrics[0].external.target.averageValue=1"
)
OTHER_EDGE = "tls.edge.certManager.enabled=false,tls.edge.existingSecret=a"
OTHER_REDIS = "redis.mode=external,redis.external.existingSecret=a,ray.gcsFaultTolerance.address=rediss://r:6379"

WITH_ADAPTER = ",".join(
    _under("cluster.models[0]", "engine.kind=vllm engine.device=cpu engine.block_tokens=32")
    + _under("cluster.models[0].adapters[0]", "name=a source=/models/a")
)

LIVE_EDITS = (
    Edit(
        "sizes of pools: `cluster.models[].prefill.workers`, `.decode.workers`",
        _under("cluster.models[0]", "prefill.workers=2 decode.workers=3 prefill.workers=0"),
        CPUS,
    ),
    Edit(
        "`cluster.models[].adapters`, of a model that has some",
        (
            *_under("cluster.models[0].adapters[0]", "name=b source=/models/b"),
            "cluster.models[0].adapters[1].name=b,cluster.models[0].adapters[1].source=/models/b",
        ),
        WITH_ADAPTER,
    ),
    Edit("`cluster.autoscaler`", _under("cluster.autoscaler", "enabled=true max_workers=4")),
    Edit("`cluster.log_level`, `cluster.log_levels`", ("cluster.log_level=debug", "cluster.log_levels.worker=error")),
    Edit(
        "limits, classes, policy and the rest of `cluster.router` but for number, hosts, ports and TLS",
        (
            *_under("cluster.router", "max_queued_requests=9 max_body_bytes=9999 drain_timeout_s=9 policy=random"),
            "cluster.router.classes[0].name=interactive,cluster.router.classes[0].ttft_slo_s=2",
        ),
    ),
    Edit(
        "contents of mounted Secrets: keys (`auth.existingSecret`), certificates",
        secrets=("tandem-keys", "test-tandem-edge-tls", "test-tandem-head-tls", "test-tandem-node-tls"),
    ),
    Edit(
        "routes: `service`, `ingress`, `gateway`",
        (
            *_under("service", "type=LoadBalancer annotations.a=b httpPort=80 grpcPort=81"),
            "service.type=LoadBalancer,service.loadBalancerClass=a",
            "ingress.enabled=true,ingress.host=b.example.com,ingress.annotations.a=b,ingress.className=a",
            "ingress.enabled=true,ingress.host=b.example.com,ingress.grpcHost=c.example.com,"
            "ingress.grpcAnnotations.a=b,ingress.tlsSecret=a",
            *_under("gateway", "enabled=false parentRefs[0].name=a hostnames[0]=b.example.com"),
            "gateway.grpcHostnames[0]=c.example.com",
            "gateway.weight=90,gateway.backends[0].release=green,gateway.backends[0].weight=10,"
            "gateway.backendTls.hostname=a.example.com",
        ),
    ),
    Edit(
        "`tls.edge.certManager`, `tls.internal.certManager` without `csi`: issuer, names, duration",
        (
            *_under("tls.edge", "certManager.dnsNames[0]=b.example.com certManager.issuerRef.name=a serverName=a"),
            *_under("tls.internal.certManager", "issuerRef.name=a duration=24h"),
        ),
    ),
    Edit(
        "`networkPolicy`, `monitoring`, `disruption`, `serviceAccount.annotations`, `rayClusterLabels`, "
        "`extraObjects`, `models.weights`, `test`",
        (
            *_under("networkPolicy", "enabled=false clients[0].podSelector.matchLabels.a=b apiServerPorts[0]=8443"),
            *_under("networkPolicy", "extraEgress[0].ports[0].port=4317 dns.port=5353"),
            *_under("monitoring", "podMonitor.enabled=true serviceMonitor.enabled=true"),
            *_under("monitoring", "prometheusRule.enabled=true dashboards.enabled=true"),
            *_under("disruption", "head.maxUnavailable=0 nodes.maxUnavailable=2 routers.maxUnavailable=2"),
            "serviceAccount.annotations.a=b",
            "rayClusterLabels.a=b",
            "extraObjects[0].apiVersion=v1,extraObjects[0].kind=ConfigMap,extraObjects[0].metadata.name=a",
            "models.weights.smollm2-135m.size=1Gi",
            *_under("test", "image=a:1 apiKeySecret.name=a"),
        ),
    ),
)

OTHER_EDITS = (
    Edit(
        "`upgrade`, `node.maxReplicas`, `routers.autoscaling`, `routers.rollingUpdate`",
        (
            *_under("upgrade", "strategy=rolling strategy=recreate stepTimeoutSeconds=99"),
            "node.maxReplicas=9",
            *_under("routers.autoscaling", "maxReplicas=9 minReplicas=1 cpuPercent=50 queuedRequests=4"),
            *_under("routers.autoscaling", "metrics[0].type=Resource behavior.scaleUp.stabilizationWindowSeconds=9"),
            "routers.rollingUpdate.maxSurge=2",
        ),
        bases=WITH_ROUTER_PODS,
    ),
    Edit(
        "`node.replicas`, `node.minReplicas`, `nodeGroups[].replicas`",
        (
            "node.replicas=3",
            "node.replicas=1",
            "node.replicas=3,node.minReplicas=3",
            *_under("nodeGroups[0]", "replicas=2 replicas=0"),
        ),
        GROUP,
    ),
    Edit("`routers.replicas`", ("routers.autoscaling.enabled=false,routers.replicas=3",), bases=WITH_ROUTER_PODS),
    Edit(
        "the rest of `routers`",
        ("routers.image.tag=v9", "routers.terminationGracePeriodSeconds=90", *_of_pod("routers")),
        bases=WITH_ROUTER_PODS,
    ),
    Edit("`auth.existingSecret`, `tls.edge.existingSecret`", ("auth.existingSecret=a", OTHER_EDGE)),
    Edit("`redis.valkey`: image, resources, `pod`, claim", ("redis.valkey.image=v:9", *_under("redis.valkey", VALKEY))),
    Edit("`scaleAdapter.enabled`", (SCALED,)),
    Edit("`scaleAdapter.autoscalers`", (AUTOSCALER,), SCALED),
    Edit(
        "the rest of `scaleAdapter`",
        (*_under("scaleAdapter", "settleSeconds=9 resources.limits.memory=1Gi"), *_under("scaleAdapter.pod", POD)),
        SCALED,
    ),
    Edit("`head`", _of_pod("head")),
    Edit("`node`: resources, place, `runtimeClassName`, `pod`", (*_of_pod("node"), "node.runtimeClassName=a")),
    Edit("the same of one of `nodeGroups`", _of_pod("nodeGroups[0]"), GROUP),
    Edit("another one of `nodeGroups`", (OTHER_GROUP,), GROUP),
    Edit("the first one of `nodeGroups`", (GROUP,)),
    Edit("the last one of `nodeGroups` goes", ("nodeGroups=null",), GROUP),
    Edit(
        "`node.roles`, `nodeGroups[].roles`",
        ("nodeGroups[0].roles[0]=decode", "node.roles[0]=prefill,nodeGroups[0].roles[0]=decode"),
        GROUP,
    ),
    Edit(
        "the rest of `cluster` but for its name; `auth.key`",
        (
            "cluster.transfer.digests=false",
            "cluster.models[0].decode.tp=2",
            "cluster.security.auth.audit_log=stdout",
            "auth.key=a.yaml",
        ),
        CPUS,
    ),
    Edit("`cluster.name`, `startupSeconds`", ("cluster.name=a", "startupSeconds=900")),
    Edit(
        "`image`, `models`, one of `cluster.models` more, `node.gpus`, `node.sharedMemory`",
        (
            *_under("image", f"tag=v9 repository=a digest=sha256:{'a' * 64}"),
            "models.pull=false,models.hostPath=/srv",
            "models.pull=false,models.image.reference=a:1,cluster.models[0].source=/models/a",
            *_under("models", "existingClaim=a emptyDirSize=9Gi hubTokenSecret.name=a"),
            "cluster.models[1].source=a/tiny,cluster.models[1].name=b",
            "node.gpus=2",
            "node.sharedMemory=2Gi",
        ),
        MEMORY,
    ),
    Edit("`node.gpuResource`", ("node.gpuResource=amd.com/gpu",), f"{MEMORY},node.gpus=2"),
    Edit("`node.onHead`", ("node.onHead=true",), bases=(IN_HEAD, RECREATE)),
    Edit("routers get pods of their own", ("routers.replicas=2",), bases=(IN_HEAD,)),
    Edit(
        "`tls.internal.existingSecret`, `podAnnotations`, `image.pullPolicy`, `preStopSeconds`, "
        "`terminationGracePeriodSeconds`",
        (
            "tls.internal.certManager.enabled=false,tls.internal.existingSecret=a",
            "podAnnotations.a=b",
            "image.pullPolicy=Always",
            "preStopSeconds=7",
            "terminationGracePeriodSeconds=90",
        ),
    ),
    Edit(
        "`tls.internal.certManager.csi`, and with it the issuer and the duration",
        _under("tls.internal.certManager", "csi=false issuerRef.name=a issuerRef.kind=ClusterIssuer duration=24h"),
        "tls.internal.certManager.csi=true",
    ),
    Edit(
        "`global`, `imagePullSecrets`, `serviceAccount.name`, `podSecurityContext`, `securityContext`, "
        "`redis.valkey.tls`",
        (
            "global.imageRegistry=r.example.com",
            "imagePullSecrets[0].name=a",
            "serviceAccount.name=a",
            "podSecurityContext.runAsUser=7",
            "securityContext.readOnlyRootFilesystem=false",
            "redis.valkey.tls.existingSecret=a",
        ),
    ),
    Edit("`redis.mode`, `redis.external`", (OTHER_REDIS,)),
    Edit("`redis.valkey.auth`", ("redis.valkey.auth.existingSecret=a",)),
    Edit(
        "the contents of Secrets with passwords of Redis or Valkey",
        secrets=("tandem-valkey", "tandem-ray"),
    ),
    Edit("`ray.gcsFaultTolerance`: its Secret", _under("ray.gcsFaultTolerance", "existingSecret=a key=a")),
    Edit("`ray.autoscaling.enabled`", (AUTOSCALED,)),
    Edit(
        "the rest of `ray.autoscaling`",
        _under("ray.autoscaling", "idleTimeoutSeconds=60 resources.limits.memory=2Gi"),
        AUTOSCALED,
    ),
    Edit("`ray.version`, `ray.authMode`", _under("ray", "version=2.61.0 authMode=disabled")),
)
EDITS = (*(replace(edit, is_live=True) for edit in LIVE_EDITS), *OTHER_EDITS)


@cache
def _helm() -> str:
    fetched = subprocess.run([ROOT / "scripts" / "fetch-helm.sh"], check=True, capture_output=True, text=True)
    return fetched.stdout.strip()


@cache
def rendered(settings: str) -> Manifests:
    """`settings` over the example. Raises ValueError with what helm says, if it refuses them."""
    command = [_helm(), "template", "test", str(CHART), "--namespace", "serving", "--values", str(EXAMPLE)]
    result = subprocess.run([*command, "--set", settings], check=False, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"{settings}: {result.stderr}")
    found = [each for each in yaml.load_all(result.stdout, Loader=yaml.CSafeLoader) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def outcome_of(edit: Edit, base: str, number: int) -> Outcome:
    """Of one of its settings, or Secrets."""
    before = ",".join(each for each in (BASES[base], edit.given) if each)
    if edit.secrets:
        return secret_outcome(rendered(before), edit.secrets[number])
    return outcome(rendered(before), rendered(f"{before},{edit.settings[number]}"))


NAMES = {"head": "head", "nodes": "nodes", "router": "routers", "valkey": "Valkey", "scale": "scale adapter"}
GROUP_NAMES = ("a", "b")  # of the settings above


def cell(found: Outcome) -> str:
    """What the table says of it."""
    pods = _listed(found.replaced)
    if not pods:
        pods = "none; pods come or go" if found.added or found.removed else "none"
    if found.applied:
        pods += " (live)"
    if found.unreached:
        pods += f"; {_listed(found.unreached)}: new pods only"
    return pods


def _listed(names: frozenset[str]) -> str:
    """Those of groups are nodes; without the group `nodes`, those of one group only."""
    groups = ["nodes of the group"] if names & set(GROUP_NAMES) and "nodes" not in names else []
    return ", ".join([shown for name, shown in NAMES.items() if name in names] + groups)


def rows(edits: Sequence[Edit] = EDITS) -> Iterator[tuple[str, list[str]]]:
    """Title and cells of each, by the first setting."""
    with ThreadPoolExecutor(2) as pool:  # of helm's processes
        cells = [
            [pool.submit(outcome_of, edit, base, 0) if base in edit.bases else None for base in BASES] for edit in edits
        ]
        for edit, futures in zip(edits, cells, strict=True):
            yield edit.title, [cell(future.result()) if future else "–" for future in futures]
