"""The chart, rendered by the real helm: what its pods are given, and that its spec is the product's spec."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.spec.changes import is_live
from cluster.spec.loader import load_spec
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.config.transfer import TransferSpec, TransportKind

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "tandem"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
SEVERAL = ("two-racks", "mixed-groups", "own-additions", "router-pods", "scaled-pools")  # pods
POD_IP = "10.1.2.3"
REDIS_URL = "rediss://user:secret@redis.example:6380/0"

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]
Render = Callable[..., Manifests]


def values(name: str) -> tuple[str, str]:
    return "--values", str(CHART / "examples" / f"{name}.yaml")


def groups_of(manifests: Manifests) -> tuple[Manifest, Manifest]:
    """The head's group and the nodes'."""
    spec = manifests["RayCluster", "test-tandem"]["spec"]
    (nodes,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"], nodes


def head_of(manifests: Manifests) -> Manifest:
    return groups_of(manifests)[0]


def container_of(group: Manifest) -> Manifest:
    (container,) = group["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def volumes_of(group: Manifest) -> dict[str, Manifest]:
    return {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}


def raw_spec(manifests: Manifests) -> Manifest:
    """The spec as the head's start script completes it."""
    text = manifests["ConfigMap", "test-tandem"]["data"]["cluster.yaml"]
    completed = text.replace("${POD_IP}", POD_IP).replace("${TANDEM_REDIS_URL}", REDIS_URL)
    assert "${" not in completed
    spec: Manifest = yaml.safe_load(completed)
    return spec


def cluster_spec(manifests: Manifests) -> ClusterSpec:
    return ClusterSpec.model_validate(raw_spec(manifests))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_lint_is_clean(helm: str, path: Path) -> None:
    command = [helm, "lint", "--strict", str(CHART), "--values", str(path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES))
def test_every_rendered_spec_is_a_valid_cluster_spec(render: Render, name: str) -> None:
    spec = cluster_spec(render(*values(name)))
    assert (spec.router.http_host, spec.router.grpc_host) == (POD_IP, POD_IP)
    assert (spec.control.backend, spec.control.ray_address) == ("ray", "auto")
    assert spec.transfer.bind_host == ("auto" if name in SEVERAL else "127.0.0.1")


def test_values_under_cluster_reach_the_spec(render: Render) -> None:
    spec = cluster_spec(render(*values("gpu-node")))
    (model,) = spec.models
    assert (model.prefill.workers, model.decode.tp) == (4, 4)
    assert [model.engine_of(role).max_step_tokens for role in Role] == [8192, 512]
    assert model.engine.kv_memory_bytes == 32 << 30
    assert spec.router.max_queued_requests == 1024


def test_logs_go_to_standard_output_unless_files_are_asked_for(render: Render) -> None:
    json = "cluster.observability.logs.format=json"
    logs = cluster_spec(render("--set", json)).observability.logs
    assert (logs.format, logs.target) == ("json", "stdout")
    files = cluster_spec(render("--set", "cluster.observability.logs.target=files"))
    assert files.observability.logs.target == "files"


def test_the_controller_is_on_the_network_only_where_other_pods_need_it(render: Render) -> None:
    assert cluster_spec(render()).control.admin_host == "127.0.0.1"
    assert cluster_spec(render(*values("two-racks"))).control.admin_host == POD_IP


def test_the_head_starts_ray_and_then_tandem(render: Render) -> None:
    manifests = render()
    cluster = manifests["RayCluster", "test-tandem"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    container = container_of(head_of(manifests))
    script = manifests["ConfigMap", "test-tandem"]["data"]["start-head.sh"]
    assert container["command"][-1] == "/etc/tandem/start-head.sh"
    assert script.index("KUBERAY_GEN_RAY_START_CMD") < script.index("tandem up --config")
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/etc/tandem", "/dev/shm", "/models"}


def test_a_node_pod_has_all_its_devices(render: Render) -> None:
    manifests = render(*values("gpu-node"))
    head, nodes = groups_of(manifests)
    assert nodes["rayStartParams"]["num-gpus"] == "8"
    for each in (nodes, head):
        assert container_of(each)["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert volumes_of(each)["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


@pytest.mark.parametrize("transport", ["auto", "nixl"])
def test_rdma_devices_are_those_of_the_nodes(render: Render, transport: str) -> None:
    rdma = f"node.rdma.resource=rdma/hca_shared_devices_a,cluster.transfer.transport={transport}"
    head, nodes = (container_of(each) for each in groups_of(render(*values("two-racks"), "--set", rdma)))
    assert nodes["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert "rdma/hca_shared_devices_a" not in head["resources"]["limits"]


@pytest.mark.parametrize(("gpus", "size"), [(0, "256Mi"), (8, "768Mi")])
def test_shared_memory_is_what_ray_and_the_collectives_need(render: Render, gpus: int, size: str) -> None:
    volumes = volumes_of(head_of(render("--set", f"node.gpus={gpus}")))
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == size


def test_a_head_that_is_no_node_offers_ray_no_devices(render: Render) -> None:
    head, nodes = groups_of(render(*values("two-racks")))
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    assert (nodes["replicas"], nodes["minReplicas"], nodes["maxReplicas"]) == (4, 0, 4)


def test_nodes_spread_over_racks(render: Render) -> None:
    _, nodes = groups_of(render(*values("two-racks")))
    (constraint,) = nodes["template"]["spec"]["topologySpreadConstraints"]
    labels = nodes["template"]["metadata"]["labels"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/rack"
    assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_start_may_take_as_long_as_the_probes_allow(render: Render) -> None:
    assert cluster_spec(render("--set", "startupSeconds=900")).control.start_timeout_s == 900
    given = render("--set", "cluster.control.start_timeout_s=300")
    assert cluster_spec(given).control.start_timeout_s == 300


def test_probes_ask_the_router_as_it_is_reached(render: Render) -> None:
    for arguments, scheme in (((), "HTTP"), (("--set", "tls.edge.existingSecret=edge"), "HTTPS")):
        container = container_of(head_of(render("--set", "startupSeconds=301", *arguments)))
        asked = {"port": "http", "scheme": scheme}
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", **asked}
        assert container["livenessProbe"]["httpGet"] == {"path": "/health", **asked}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 301


def test_a_pod_serves_on_until_load_balancers_forgot_it_and_then_drains(render: Render) -> None:
    manifests = render("--set", "preStopSeconds=7")
    head = head_of(manifests)
    drain_s = cluster_spec(manifests).router.drain_timeout_s
    assert container_of(head)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert head["template"]["spec"]["terminationGracePeriodSeconds"] > 7 + drain_s


def test_a_node_that_is_told_to_end_is_drained_by_ray_within_the_grace(render: Render) -> None:
    _, nodes = groups_of(render("--set", "preStopSeconds=7,terminationGracePeriodSeconds=90"))
    container = container_of(nodes)
    assert "exec $KUBERAY_GEN_RAY_START_CMD" in container["args"][0], "Ray is process 1, which the hook tells"
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == "sleep 7; kill -TERM 1; sleep infinity"
    variable = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    (drain_s,) = (each["value"] for each in container["env"] if each["name"] == variable)
    assert 7 + int(drain_s) + 10 == nodes["template"]["spec"]["terminationGracePeriodSeconds"]
    (ray,) = (find_spec("ray") or pytest.fail("no Ray")).submodule_search_locations or []
    assert variable in (Path(ray) / "_private" / "ray_constants.py").read_text(), "Ray has another name for it now"


def test_every_router_has_its_ports_on_the_pod_and_on_the_services(render: Render) -> None:
    manifests = render("--set", "service.httpPort=80", "--set", "cluster.router.replicas=3")
    head = head_of(manifests)
    labels = head["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container_of(head)["ports"]}
    for name, port, target in (("http", 80, 8000), ("grpc", 50051, 50051)):
        service = manifests["Service", f"test-tandem-{name}"]["spec"]
        assert service["selector"].items() <= labels.items()
        assert [each["port"] for each in service["ports"]] == [port, port + 1, port + 2]
        assert [ports[each["targetPort"]] for each in service["ports"]] == [target, target + 1, target + 2]
    admin_port = cluster_spec(manifests).control.admin_port
    assert admin_port not in ports.values()  # routers_specs would leave it out of their ports
    assert len(manifests["Service", "test-tandem-headless"]["spec"]["ports"]) == 6


def test_routes_balance_over_all_routers(render: Render) -> None:
    manifests = render(*values("two-racks"))
    for kind, service in (("HTTPRoute", "test-tandem-http"), ("GRPCRoute", "test-tandem-grpc")):
        (rule,) = manifests[kind, "test-tandem"]["spec"]["rules"]
        backends = {(backend["name"], backend["port"]) for backend in rule["backendRefs"]}
        ports = manifests["Service", service]["spec"]["ports"]
        assert backends == {(service, port["port"]) for port in ports}


def test_an_ingress_names_both_protocols(render: Render) -> None:
    manifests = render(*values("external-redis"))
    protocol = "nginx.ingress.kubernetes.io/backend-protocol"
    for kind, host, spoken in (("http", "llm.example.com", None), ("grpc", "llm-grpc.example.com", "GRPC")):
        ingress = manifests["Ingress", f"test-tandem-{kind}"]
        assert ingress["metadata"]["annotations"].get(protocol) == spoken
        (rule,) = ingress["spec"]["rules"]
        assert rule["host"] == host
        assert ingress["spec"]["tls"] == [{"secretName": "llm-example-com", "hosts": [host]}]


def test_an_ingress_may_name_every_host_of_a_domain(render: Render) -> None:
    settings = "ingress.enabled=true,ingress.host=*.example.com,cluster.security.auth.mode=none"
    manifests = render("--set", settings)
    assert manifests["Ingress", "test-tandem-http"]["spec"]["rules"][0]["host"] == "*.example.com"
    assert ("Ingress", "test-tandem-grpc") not in manifests


def test_only_the_routers_ports_are_open_to_other_pods(render: Render) -> None:
    policy = render("--set", "cluster.router.replicas=2")["NetworkPolicy", "test-tandem-clients"]["spec"]
    (rule,) = policy["ingress"]
    assert "from" not in rule
    assert [port["port"] for port in rule["ports"]] == ["http", "grpc", "http-1", "grpc-1"]
    named = render(*values("secured"))["NetworkPolicy", "test-tandem-clients"]["spec"]["ingress"][0]
    assert len(named["from"]) == 3  # two named, and helm test


def test_secrets_come_by_reference_only(example: Manifests) -> None:
    assert not [kind for kind, _ in example if kind == "Secret"]


def test_valkey_knows_one_user_whose_password_is_in_a_secret(render: Render) -> None:
    manifests = render(*values("valkey"))
    env = {entry["name"]: entry for entry in container_of(head_of(manifests))["env"]}
    secret = env["VALKEY_PASSWORD"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "tandem-valkey", "key": "password", "optional": True}
    assert "tandem:$(VALKEY_PASSWORD)@" in env["TANDEM_REDIS_URL"]["value"]
    valkey = container_of(manifests["Deployment", "test-tandem-valkey"]["spec"])
    assert "user default off" in valkey["args"][0]
    assert cluster_spec(manifests).redis.mode == "external"


def test_rays_tables_are_in_valkey_under_a_user_and_a_name_of_their_own(render: Render) -> None:
    assert "gcsFaultToleranceOptions" not in render(*values("valkey"))["RayCluster", "test-tandem"]["spec"]
    manifests = render(*values("ray-tables"))
    secret = {"name": "tandem-ray-tables", "key": "password"}
    assert manifests["RayCluster", "test-tandem"]["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis://test-tandem-valkey:6379",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": {"secretKeyRef": secret}},
        "externalStorageNamespace": "serving.test-tandem",
    }
    valkey = manifests["Deployment", "test-tandem-valkey"]["spec"]
    env = {entry["name"]: entry for entry in container_of(valkey)["env"]}
    assert env["RAY_PASSWORD"]["valueFrom"]["secretKeyRef"] == secret
    config = container_of(valkey)["args"][0]
    assert "user ray on >$RAY_PASSWORD ~RAYserving.test-tandem@* ~DUMMY " in config
    assert "appendonly yes" in config
    assert volumes_of(valkey)["data"] == {"name": "data", "persistentVolumeClaim": {"claimName": "tandem-valkey"}}


def test_rays_tables_may_be_in_a_redis_of_your_own(render: Render) -> None:
    tables = "ray.gcsFaultTolerance"
    settings = f"{tables}.enabled=true,{tables}.existingSecret=x,{tables}.address=rediss://r.example:6380"
    manifests = render(*values("external-redis"), "--set", f"{settings},{tables}.port=6380,{tables}.username=mine")
    options = manifests["RayCluster", "test-tandem"]["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://r.example:6380"
    assert options["redisUsername"] == {"value": "mine"}
    env = {entry["name"]: entry for entry in container_of(head_of(manifests))["env"]}
    assert env["RAY_REDIS_CA_CERT"]["value"] == "/etc/tandem-redis/ca.crt"
    policy = manifests["NetworkPolicy", "test-tandem-ray-tables"]["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 6380}]}]


def test_external_redis_takes_its_url_from_a_secret(render: Render) -> None:
    manifests = render(*values("external-redis"))
    env = {entry["name"]: entry for entry in container_of(head_of(manifests))["env"]}
    secret = env["TANDEM_REDIS_URL"]["valueFrom"]["secretKeyRef"]
    assert (secret["name"], secret["key"]) == ("prefix-redis", "url")
    assert volumes_of(head_of(manifests))["redis-ca"]["secret"]["secretName"] == "prefix-redis-ca"
    assert ("Deployment", "test-tandem-valkey") not in manifests


def test_keys_and_certificates_are_where_the_spec_says(render: Render) -> None:
    manifests = render(*values("secured"))
    spec, head = raw_spec(manifests), head_of(manifests)
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(head)["volumeMounts"]}
    named = [spec["router"]["tls"], spec["security"]["tls"], {"keys": spec["security"]["auth"]["keys_file"]}]
    for path in (path for files in named for path in files.values()):
        assert volumes_of(head)[mounts[path.rpartition("/")[0]]]["secret"]["optional"] is True


def test_nodes_get_neither_keys_nor_the_edge_nor_the_controllers_certificate(render: Render) -> None:
    manifests = render(*values("secured"))
    _, nodes = groups_of(manifests)
    assert {"keys", "tls-edge"}.isdisjoint(volumes_of(nodes))
    (secret,) = [volume["secret"]["secretName"] for name, volume in volumes_of(nodes).items() if name == "tls-internal"]
    certificates = {m["spec"]["secretName"]: m["spec"] for (kind, _), m in manifests.items() if kind == "Certificate"}
    assert certificates[secret]["uris"] == ["spiffe://tandem/secured/worker"]


def test_helm_test_goes_through_the_secured_edge(render: Render) -> None:
    pod = render(*values("secured"))["Pod", "test-tandem-test-completion"]["spec"]
    (container,) = pod["containers"]
    script = container["args"][0]
    assert "https://test-tandem-http.serving.svc:8000/v1/completions" in script
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "tandem-smoke-key", "key": "key"}
    assert "$API_KEY" in script.partition("curl")[0]  # in a file, not among the arguments


@pytest.mark.parametrize(
    ("kind", "endpoints"), [("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")]
)
def test_metrics_are_scraped_from_every_router(render: Render, kind: str, endpoints: str) -> None:
    value = f"{kind[0].lower()}{kind[1:]}"
    manifests = render("--set", f"monitoring.{value}.enabled=true", "--set", "cluster.router.replicas=2")
    spec = manifests[kind, "test-tandem"]["spec"]
    assert [(each["port"], each["path"]) for each in spec[endpoints]] == [("http", "/metrics"), ("http-1", "/metrics")]
    wanted = spec["selector"]["matchLabels"].items()
    services = [each for (kind, _), each in manifests.items() if kind == "Service"]
    chosen = [each["metadata"]["name"] for each in services if wanted <= each["metadata"]["labels"].items()]
    assert chosen == ([] if kind == "PodMonitor" else ["test-tandem-headless"])


def test_a_model_given_as_a_path_is_not_pulled(render: Render) -> None:
    pulled = head_of(render())["template"]["spec"]["initContainers"]
    assert [container["command"] for container in pulled] == [
        ["tandem", "pull", "smollm2-135m", "--volume-bytes", str(8 << 30)]
    ]
    local = render("--set", "cluster.models[0].source=/models/mine,models.existingClaim=weights")
    assert "initContainers" not in head_of(local)["template"]["spec"]


def changed(name: str, value: object) -> object:
    """Another value of this setting of routers."""
    others = {
        "classes": [{"name": "only"}],
        "cors_origins": ["*"],
        "idempotency": {"keep_s": 5},
        "policy": "round_robin",
        "disaggregation": "always",
        "record": "/tmp/recorded",
        "index_memory_bytes": 1 << 30,
    }
    if name in others:
        return others[name]
    return not value if isinstance(value, bool) else int(str(value).partition(".")[0]) + 1


def test_a_spec_changed_where_it_is_fixed_changes_the_head_pod_and_only_then(render: Render) -> None:
    def cluster(setting: str = 'cluster.name="tandem"') -> Manifest:
        room = "node.resources.requests.cpu=8,node.resources.limits.memory=64Gi,cluster.models[0].engine.device=cpu"
        return render("--set", room, "--set-json", setting)["RayCluster", "test-tandem"]

    before = cluster()
    for setting in (
        "cluster.models[0].decode.tp=2",
        "cluster.router.replicas=2",
        "cluster.transfer.digests=false",
    ):
        assert cluster(setting) != before, setting
    live: dict[str, object] = {
        "autoscaler.enabled": True, "log_level": "debug", "log_levels.router": "error",
        "models[0].prefill.workers": 2, "models[0].decode.workers": 2,
    }  # fmt: skip
    for name, value in load_spec(None, {}, {}).router.model_dump(mode="json").items():
        if is_live(f"router.{name}"):
            live[f"router.{name}"] = changed(name, value)
    assert {"router.classes", "router.max_queued_requests", "router.drain_timeout_s"} <= live.keys()
    for path, value in live.items():
        assert is_live(path.replace("[0]", ".0"))
        assert cluster(f"cluster.{path}={json.dumps(value)}") == before, path
    less = render("--set", "cluster.models[0].prefill.workers=0")
    assert less["ConfigMap", "test-tandem"] != render()["ConfigMap", "test-tandem"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("node.gpu=1", "gpu"),
        ("cluster.router.http_prt=1", "http_prt"),
        ("cluster.models[0].decode.workers=many", "/cluster/models/0/decode/workers"),
        ("cluster.log_level=loud", "/cluster/log_level"),
        ("redis.mode=valkey", "redis.valkey.auth.existingSecret: expected the name"),
        ("redis.mode=external", "redis.external.existingSecret: expected the name"),
        ("ray.gcsFaultTolerance.enabled=true", "ray.gcsFaultTolerance.existingSecret: expected the name"),
        (
            "ray.gcsFaultTolerance.enabled=true,ray.gcsFaultTolerance.existingSecret=x",
            "ray.gcsFaultTolerance.address: expected redis://HOST:PORT or rediss://HOST:PORT, because redis.mode is",
        ),
        ("ray.gcsFaultTolerance.address=redis://u:p@h:1", "/ray/gcsFaultTolerance/address"),
        ("redis.valkey.existingClaim=x", "redis.valkey.existingClaim: expected none"),
        ("image.digest=latest", "/image/digest"),
        ("node.sharedMemory=lots", "/node/sharedMemory"),
        ("service.httpPort=0", "/service/httpPort"),
        ("auth.existingSecret=keys", "test.apiKeySecret.name: expected the name of a Secret with an API key"),
        ("tls.internal.certManager.enabled=true", "tls.internal.certManager.issuerRef.name: expected"),
        ("tls.edge.existingSecret=x,tls.edge.certManager.enabled=true", "tls.edge: expected existingSecret or"),
        ("gateway.enabled=true", "gateway.parentRefs: expected at least one"),
        (
            "gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.grpcHostnames[0]=a.example",
            "gateway.hostnames: expected the hosts of HTTP, because gateway.grpcHostnames is set",
        ),
        (
            "gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.hostnames[0]=a.example,"
            "gateway.grpcHostnames[0]=b.example,gateway.grpcHostnames[1]=a.example",
            "gateway.grpcHostnames: expected hosts other than gateway.hostnames, got a.example in both",
        ),
        (
            "gateway.enabled=true,gateway.parentRefs[0].name=g,tls.edge.existingSecret=edge",
            "gateway.backendTls.caConfigMap: expected the name of a ConfigMap",
        ),
        ("gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.weight=0", "gateway.weight: expected at least one"),
        (
            "gateway.enabled=true,gateway.parentRefs[0].name=g,gateway.backends[0].release=test,"
            "gateway.backends[0].weight=1",
            "gateway.backends[0].release: expected each release once, and not this one",
        ),
        ("cluster.models[0].source=s3://bucket/model", "cluster.models[0].source: expected a hub name or a folder"),
        ("monitoring.prometheusRule.runbookUrl=docs", "/monitoring/prometheusRule/runbookUrl"),
        ("head.nodeSelector.a=b", "head.nodeSelector: expected none with node.onHead: true"),
        ("networkPolicy.dns.port=0", "/networkPolicy/dns/port"),
        ("service.loadBalancerClass=x", "service.loadBalancerClass: expected none with service.type ClusterIP"),
        ("serviceAccount.name=mine,serviceAccount.annotations.a=b", "serviceAccount.annotations: expected none with"),
        ("global.imageRegistry=registry.example/", "/global/imageRegistry"),
        ("ingress.enabled=true", "ingress.host: expected a host name"),
        ("cluster.models[0].source=/models/x", "models.existingClaim: expected a claim"),
        ("cluster.models[0].source=/data/x", "cluster.models[0].source: expected a folder below /models"),
        ("models.pull=false", "models.pull: expected true, or models.existingClaim"),
        ("models.hostPath=models", "/models/hostPath"),
        ("disruption.head.maxUnavailable=2", "/disruption/head/maxUnavailable"),
        ("monitoring.podMonitor.interval=often", "/monitoring/podMonitor/interval"),
        ("cluster.redis.mode=none", "cluster.redis"),
        ("cluster.router.http_port=80", "cluster.router.http_port"),
        ("cluster.control.backend=subprocess", "cluster.control.backend"),
        ("cluster.transfer.bind_host=0.0.0.0", "cluster.transfer.bind_host"),
        ("node.sharedMemory=64Mi", "node.sharedMemory: expected at least 256Mi"),
        ("cluster.models[0].engine.kv_memory_bytes=34359738368", "node.resources.limits.memory"),
        ("cluster.models[0].engine.host_kv_memory_bytes=34359738368", "node.resources.limits.memory"),
        ("cluster.models[0].engine.threads_per_rank=8", "node.resources.requests.cpu"),
        ("cluster.models[0].engine.device=cuda", "node.gpus: expected the GPUs of a node"),
        (
            "cluster.models[0].engine.device=cuda,node.gpus=2,cluster.models[0].decode.tp=4",
            "cluster.models[0].decode.tp: expected at most node.gpus (2)",
        ),
        (
            "models.existingClaim=a,models.hostPath=/b",
            "models: expected one of existingClaim, hostPath and image.reference, got several",
        ),
        ("node.replicas=1", "redis.mode: expected valkey or external"),
        ("node.onHead=false", "node.replicas: expected at least 1"),
        ("node.minReplicas=2", "node.minReplicas: expected at most"),
        ("redis.mode=external,redis.external.existingSecret=x,node.replicas=9", "node.maxReplicas: expected at least"),
        (
            "node.replicas=1,redis.mode=external,redis.external.existingSecret=x",
            "tls.internal: expected existingSecret",
        ),
        ("terminationGracePeriodSeconds=20", "terminationGracePeriodSeconds: expected at least 45"),
    ],
)
def test_a_wrong_value_fails_and_is_named(refusal: Callable[..., str], setting: str, named: str) -> None:
    assert named in refusal("--set", setting)


@pytest.mark.parametrize("transport", TransportKind)
@pytest.mark.parametrize(
    "tls",
    [
        "tls.internal.existingSecret=certs",
        "tls.internal.certManager.enabled=true,tls.internal.certManager.issuerRef.name=x",
    ],
)
def test_the_chart_refuses_with_tls_what_the_spec_refuses(
    render: Render, refusal: Callable[..., str], transport: TransportKind, tls: str
) -> None:
    setting = f"cluster.transfer.transport={transport}"
    assert cluster_spec(render("--set", setting)).transfer.transport is transport
    if TransferSpec(transport=transport).can_encrypt:
        assert cluster_spec(render("--set", f"{setting},{tls}")).security.tls is not None
    else:
        said = refusal("--set", f"{setting},{tls}")
        assert f"cluster.transfer.transport: expected auto, mapped or tcp with tls.internal, got {transport}" in said


EXPOSED = [
    ("service.type=LoadBalancer", "service.type is LoadBalancer"),
    ("service.type=NodePort", "service.type is NodePort"),
    ("ingress.enabled=true,ingress.host=llm.example.com", "ingress.enabled is true"),
    ("gateway.enabled=true,gateway.parentRefs[0].name=public", "gateway.enabled is true"),
]


@pytest.mark.parametrize(("setting", "named"), EXPOSED)
def test_nobody_is_let_in_unasked_from_beyond_the_cluster_unless_that_is_said(
    render: Render, refusal: Callable[..., str], setting: str, named: str
) -> None:
    said = refusal("--set", setting)
    assert "auth.existingSecret: expected the name of a Secret with API keys" in said
    assert named in said
    assert named in refusal("--set", f"{setting},cluster.security.auth.audit_log=stdout")
    jwt = "issuer=https://login.example.org,audience=tandem,jwks_url=https://login.example.org/keys"
    ways = [
        "auth.existingSecret=keys,test.apiKeySecret.name=key",
        "cluster.security.auth.mode=none",
        ",".join(f"cluster.security.auth.jwt.{each}" for each in jwt.split(",")),
    ]
    for way in ways:
        auth = cluster_spec(render("--set", f"{setting},{way}")).security.auth
        assert auth.required == ("mode=none" not in way)


SHARED = ("--set-json", 'node.gpus=1,cluster.models[0].engine={"device": "cuda", "device_share": 0.45}')


def test_ranks_without_a_gpu_are_counted(refusal: Callable[..., str]) -> None:
    said = refusal(*values("gpu-node"), "--set", "cluster.models[0].prefill.workers=5,node.replicas=0")
    ranks = "cluster.models[0].prefill 5 × 1, cluster.models[0].decode 1 × 4"
    assert (
        f"node.gpus: expected 9 or more over 1 node (engine.device_share of a GPU for each rank, workers × tp: {ranks})"
        in said
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("cluster.models[0].engine.device_share=0.6", "node.gpus: expected 2 or more over 1 node"),
        ("cluster.models[0].prefill.engine.device_share=0.9", "node.gpus: expected 2 or more over 1 node"),
        (
            'cluster.models[0].engine.device="cpu",cluster.models[0].decode.engine.device="cuda",node.gpus=0',
            "because cluster.models[0].decode.engine.device is cuda",
        ),
        (
            "cluster.models[0].decode.tp=2,node.gpus=2",
            "cluster.models[0].decode.tp: expected 1 with engine.device_share 0.45",
        ),
        (
            'node.rdma.resource="rdma/hca",cluster.transfer.transport="tcp"',
            "node.rdma.resource: expected none with cluster.transfer.transport tcp: only nixl, which auto takes too",
        ),
        (
            'node.rdma.resource="rdma/hca",tls.internal.existingSecret="certs"',
            "node.rdma.resource: expected none with tls.internal: nixl cannot be encrypted",
        ),
    ],
)
def test_shares_roles_and_devices_that_do_not_fit_are_named(
    refusal: Callable[..., str], settings: str, text: str
) -> None:
    assert text in refusal(*SHARED, "--set-json", settings)


def test_both_roles_fit_one_gpu_by_their_shares(render: Render) -> None:
    manifests = render(*SHARED)
    (model,) = cluster_spec(manifests).models
    assert {model.engine_of(role).device_share for role in Role} == {0.45}
    assert container_of(head_of(manifests))["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_a_digest_wins_over_the_tag(render: Render) -> None:
    digest = "sha256:" + base64.b16encode(bytes(32)).decode().lower()
    container = container_of(head_of(render("--set", f"image.digest={digest}", "--set", "image.tag=x")))
    assert container["image"] == f"tandem@{digest}"
