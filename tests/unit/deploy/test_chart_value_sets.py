"""Many values at once, as platform teams mix them: what renders is what Kubernetes, KubeRay and Tandem take, and what
does not names the value."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.conftest import CHART, ROOT, parse
from tests.unit.deploy.test_chart import cluster_spec
from tests.unit.deploy.test_chart_objects import NEWEST, check_custom, check_native, containers, pods

Manifests = dict[tuple[str, str], dict[str, Any]]

PLAIN = "cluster.security.allow_plaintext=true"
REDIS = "redis.mode=external,redis.external.existingSecret=redis"
SEVERAL = f"{REDIS},{PLAIN}"
KEYS = "auth.existingSecret=keys,test.apiKeySecret.name=smoke"
GPUS = "cluster.models[0].engine.device=cuda,node.resources.requests.cpu=32,node.resources.limits.memory=512Gi"
GATEWAY = "gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.hostnames[0]=llm.example.com"
NODES = f"{GPUS},{SEVERAL},node.onHead=false"
TLS = (
    "tls.internal.existingSecret=internal,redis.mode=valkey,redis.valkey.auth.existingSecret=v,"
    "redis.valkey.tls.existingSecret=vt"
)

SETS: dict[str, str] = {
    "tiny": "",
    "two routers in one pod": "cluster.router.replicas=2",
    "router pods": f"routers.replicas=2,{SEVERAL}",
    "scaled router pods": f"routers.autoscaling.enabled=true,{SEVERAL}",
    "scaled by the queue": f"routers.autoscaling.enabled=true,routers.autoscaling.queuedRequests=8,{SEVERAL}",
    "router pods with mutual TLS": f"routers.replicas=2,{TLS},tls.internal.routerSecret=r,tls.internal.nodeSecret=n",
    "rolling upgrades": f"routers.replicas=2,{TLS},node.onHead=false,node.replicas=3,upgrade.strategy=rolling,"
    "ray.gcsFaultTolerance.enabled=true,ray.gcsFaultTolerance.existingSecret=r",
    "2P:1D of width 4 on three nodes": f"{NODES},node.replicas=3,node.gpus=4,cluster.models[0].prefill.workers=2,"
    "cluster.models[0].prefill.tp=4,cluster.models[0].decode.tp=4",
    "groups of nodes": f"{NODES},node.gpus=4,nodeGroups[0].name=h100,nodeGroups[0].replicas=2,"
    "nodeGroups[0].roles[0]=prefill,nodeGroups[1].name=h200,nodeGroups[1].replicas=1,nodeGroups[1].gpus=8,nodeGroups[1].rdma.resource=rdma/hca",
    "nodes that come and go": f"{SEVERAL},node.onHead=false,ray.autoscaling.enabled=true,node.minReplicas=1",
    "roles on one machine": f"{GPUS},node.gpus=2,cluster.models[0].colocate=require",
    "one machine of two GPUs": f"{GPUS},node.gpus=2",
    "autoscaling": f"{NODES},node.replicas=2,node.gpus=4,node.maxReplicas=4,cluster.autoscaler.enabled=true,"
    "cluster.autoscaler.max_workers=8",
    "certificates of cert-manager": "tls.internal.certManager.enabled=true,tls.internal.certManager.issuerRef.name=i,"
    "tls.internal.certManager.issuerRef.kind=ClusterIssuer",
    "an issuer of another group": "tls.edge.certManager.enabled=true,tls.edge.certManager.issuerRef.name=i,"
    "tls.edge.certManager.issuerRef.kind=AWSPCAIssuer,tls.edge.certManager.issuerRef.group=awspca.cert-manager.io",
    "a certificate for each pod": "tls.internal.certManager.enabled=true,tls.internal.certManager.issuerRef.name=i,"
    "tls.internal.certManager.csi=true,tls.internal.certManager.duration=24h",
    "edge TLS": "tls.edge.existingSecret=edge",
    "mutual TLS": TLS,
    "Valkey": "redis.mode=valkey,redis.valkey.auth.existingSecret=v",
    "Ray's tables in Valkey": "redis.mode=valkey,redis.valkey.auth.existingSecret=v,redis.valkey.existingClaim=c,"
    "ray.gcsFaultTolerance.enabled=true,ray.gcsFaultTolerance.existingSecret=r",
    "Ray's tables elsewhere": f"{SEVERAL},ray.gcsFaultTolerance.enabled=true,ray.gcsFaultTolerance.existingSecret=r,"
    "ray.gcsFaultTolerance.address=redis://redis:6379",
    "external Redis with TLS": f"{REDIS},redis.external.caSecret=ca,redis.external.port=6380",
    "keys": KEYS,
    "a Gateway and keys": f"{GATEWAY},{KEYS}",
    "a Gateway for both protocols": f"{GATEWAY},gateway.grpcHostnames[0]=grpc.example.com,{KEYS}",
    "a Gateway with edge TLS": f"{GATEWAY},{KEYS},tls.edge.existingSecret=e,gateway.backendTls.caConfigMap=ca",
    "a Gateway with an endpoint picker": f"{GATEWAY},gateway.inferencePool.enabled=true,"
    f"gateway.inferencePool.endpointPicker.service=epp,routers.replicas=2,{SEVERAL},cluster.security.auth.mode=none",
    "blue and green": f"{GATEWAY},{KEYS},gateway.weight=90,gateway.backends[0].release=green,"
    "gateway.backends[0].weight=10",
    "an Ingress": f"ingress.enabled=true,ingress.host=a.example.com,ingress.grpcHost=b.example.com,{KEYS}",
    "a load balancer": f"service.type=LoadBalancer,service.loadBalancerClass=example.com/lb,{KEYS}",
    "a node port": f"service.type=NodePort,{KEYS}",
    "tokens of an issuer": "cluster.security.auth.jwt.issuer=https://i.example.com,cluster.security.auth.jwt.audience=llm,"
    "cluster.security.auth.jwt.jwks_url=https://i.example.com/keys",
    "one registry": "global.imageRegistry=registry.example.com/mirror,imagePullSecrets[0].name=pull",
    "a digest": f"image.digest=sha256:{'a' * 64}",
    "RDMA": f"{NODES},node.replicas=2,node.gpus=4,node.rdma.resource=rdma/hca,node.rdma.count=2",
    "a runtime class and a spread": f"{NODES},node.replicas=2,node.gpus=4,node.runtimeClassName=nvidia,"
    "node.topologySpreadConstraints[0].maxSkew=1,node.topologySpreadConstraints[0].topologyKey=rack,"
    "node.topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
    "own additions": "node.pod.priorityClassName=high,node.pod.hostNetwork=true,node.pod.env[0].name=NCCL_IB_HCA,"
    "node.pod.env[0].value=mlx5,head.pod.schedulerName=kai,head.pod.labels.team=a",
    "claims of devices": "node.pod.resourceClaims[0].name=gpu,node.resources.claims[0].name=gpu,"
    "node.pod.resourceClaims[0].resourceClaimTemplateName=gpus",
    "own additions to routers": f"routers.replicas=1,{SEVERAL},routers.pod.env[0].name=A,routers.pod.env[0].value=b,"
    "routers.pod.volumes[0].name=v,routers.pod.volumeMounts[0].name=v,routers.pod.volumeMounts[0].mountPath=/v,"
    "routers.nodeSelector.pool=small,routers.tolerations[0].key=k",
    "models on a claim": "models.existingClaim=weights,models.pull=false,cluster.models[0].source=/models/llama",
    "models on each machine": "models.hostPath=/srv/models,models.pull=false,cluster.models[0].source=/models/llama",
    "models of a hub": "cluster.models[0].source=org/model,models.hubTokenSecret.name=hub,models.emptyDirSize=200Gi",
    "models in an image": "models.image.reference=registry.example.com/llama:1,cluster.models[0].source=/models/llama",
    "weights of a told size": "cluster.models[0].source=org/model,models.weights.org/model.size=6Gi,"
    "node.resources.limits.memory=32Gi",
    "several models": "cluster.models[0].name=a,cluster.models[1].name=b,node.resources.requests.cpu=4",
    "one worker for all": "cluster.models[0].prefill.workers=0,cluster.models[0].decode.workers=1",
    "monitoring": "monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true,"
    "monitoring.prometheusRule.enabled=true,monitoring.dashboards.enabled=true",
    "no policies": "networkPolicy.enabled=false",
    "named clients": "networkPolicy.clients[0].podSelector.matchLabels.app=web,"
    "networkPolicy.extraEgress[0].ports[0].port=4317",
    "an account of one's own": "serviceAccount.name=mine",
    "logs as JSON, traces": "cluster.observability.logs.format=json,"
    "cluster.observability.tracing.otlp_endpoint=http://otel:4317",
    "pools that Kubernetes scales": f"scaleAdapter.enabled=true,{PLAIN}",
    "autoscaled pools": "scaleAdapter.enabled=true,tls.internal.existingSecret=i,"
    "scaleAdapter.autoscalers[0].role=decode,scaleAdapter.autoscalers[0].maxReplicas=4,scaleAdapter.autoscalers[0].metrics[0].type=External,"
    "scaleAdapter.autoscalers[0].metrics[0].external.metric.name=m,"
    "scaleAdapter.autoscalers[0].metrics[0].external.target.type=AverageValue,"
    "scaleAdapter.autoscalers[0].metrics[0].external.target.averageValue=1",
    "Kueue": "rayClusterLabels.kueue\\.x-k8s\\.io/queue-name=q",
    "objects of one's own": "extraObjects[0].apiVersion=v1,extraObjects[0].kind=ConfigMap,"
    "extraObjects[0].metadata.name=mine",
    "int8 and a host tier": "cluster.models[0].engine.weights=int8,"
    "cluster.models[0].engine.host_kv_memory_bytes=1073741824",
}


def check(manifests: Manifests) -> None:
    """By Kubernetes' schema, those of other projects with CEL rules, and Tandem's spec."""
    check_native(manifests, NEWEST)
    check_custom(manifests)
    spec = cluster_spec(manifests)
    names = {f"{kind}/{name}" for kind, name in manifests}
    assert len(names) == len(manifests)
    for name, pod in pods(manifests):
        mounted = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])}
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        assert mounted <= volumes, name
        for each in containers(pod):
            variables = [variable["name"] for variable in each.get("env", [])]
            assert len(variables) == len(set(variables)), f"{name}: {variables}"
    router_pods = ("Deployment", "test-tandem-router") in manifests
    assert router_pods == (spec.router.replicas == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_each_set_of_values_renders_what_all_sides_take(render: Callable[..., Manifests], name: str) -> None:
    check(render(*(["--set", SETS[name]] if SETS[name] else [])))


MIXTURES = 40


def test_there_are_as_many_sets_as_the_documents_say() -> None:
    (said,) = re.findall(r"(\d+) sets of values, (\d+) mixtures", (ROOT / "docs" / "chart-tests.md").read_text())
    assert said == (str(len(SETS)), str(MIXTURES))
    assert len(SETS) >= 40


def mixtures() -> list[str]:
    """Two or three of the sets above together, drawn with a fixed seed."""
    draw = random.Random(7)
    drawn = (draw.sample(sorted(SETS), draw.choice((2, 2, 3))) for _ in range(MIXTURES))
    return [",".join(filter(None, map(SETS.__getitem__, names))) for names in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MIXTURES))
def test_values_that_render_are_those_that_the_cluster_takes(helm: str, number: int, tmp_path: Path) -> None:
    """And a refusal names a value: nothing renders that the head's `tandem up` would then refuse."""
    settings = mixtures()[number]
    command = [
        helm,
        "template",
        "test",
        str(CHART),
        "--namespace",
        "serving",
        *(["--set", settings] if settings else []),
    ]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode == 0:
        check(parse(result.stdout))
    else:
        named = re.search(r": [a-z]\w*(\.\w+|\[\d+\])*: expected |at '/\w+[^']*': ", result.stderr)
        assert named, settings + "\n" + result.stderr
