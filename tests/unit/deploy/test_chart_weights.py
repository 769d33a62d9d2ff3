"""Models have room: on the disk they are pulled to, in the pods' local storage, and in memory where a CPU serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.spec.resolve import PROCESS_BYTES
from tandem.checkpoint.model_store import PACKAGED
from tandem.config.model import DEMO_MODEL
from tests.unit.deploy.conftest import CHART
from tests.unit.deploy.test_chart import cluster_spec, container_of, head_of, volumes_of

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]

GPU = "cluster.models[0].engine.device=cuda,node.gpus=8"
SEVERAL = "redis.mode=external,redis.external.existingSecret=r,cluster.security.allow_plaintext=true"
GIB = 1 << 30


def source(name: str, number: int = 0) -> str:
    return f"cluster.models[{number}].source={name}"


def weights(name: str, size: str) -> str:
    """The flag's key: a dot in a name is part of it."""
    return f"models.weights.{name.replace('.', chr(92) + '.')}.size={size}"


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "117.3Gi for meta-llama/Llama-3.1-70B-Instruct (70b in its name)"),
        ("org/model_13b", "21.8Gi"),
        ("org/Qwen3-30B-A3B", "50.3Gi"),
        ("mistralai/Mixtral-8x7B-v0.1", "62.6Gi for mistralai/Mixtral-8x7B-v0.1 (8x7b in its name)"),
        ("org/huge-1t", "1676.4Gi"),
        ("org/Qwen2-57B-A14B", "95.6Gi"),
        ("org/qwen2-5-32-5b", "54.5Gi for org/qwen2-5-32-5b (32.5b in its name)"),
    ],
)
def test_a_model_too_large_for_the_default_volume_is_refused(
    refusal: Callable[..., str], name: str, needed: str
) -> None:
    said = refusal("--set", f"{GPU},{source(name)}")
    assert f"models.emptyDirSize: expected more than {needed}" in said
    assert "got 8Gi; raise it, or mount a volume that holds them (models.existingClaim)" in said


@pytest.mark.parametrize(
    "name",
    [
        "org/phi-3-mini-4k",  # of no known size
        "org/model-v0.1-2024b8",
        "org/llama-3.2-3b-instruct",
        "org/gemma-270m",
        "org/A22B",
        "org/qwen2-5-1-5b-instruct",
        "org/internlm2-1_8b",
        "org/ft-10b-tokens-smollm2-135m",  # the least of several counts
        "org/distilled_from_70b_3b",
    ],
)
def test_what_clearly_fits_or_is_not_known_renders(render: Render, name: str) -> None:
    render("--set", f"{GPU},{source(name)}")


def test_a_told_size_overrides_the_name(render: Render, refusal: Callable[..., str]) -> None:
    draft = f"{GPU},{source('org/draft-of-llama-3.1-70b')}"
    assert "models.emptyDirSize" in refusal("--set", draft)
    render("--set", f"{draft},{weights('org/draft-of-llama-3.1-70b', '2Gi')}")
    said = refusal("--set", f"{GPU},{source('org/unnamed')},{weights('org/unnamed', '9Gi')}")
    assert "models.emptyDirSize: expected more than 9.0Gi for org/unnamed (9Gi in models.weights)" in said


def test_models_that_share_the_volume_are_summed_and_those_of_one_source_counted_once(
    render: Render, refusal: Callable[..., str]
) -> None:
    names = "cluster.models[0].name=a,cluster.models[1].name=b,cluster.models[1].engine.device=cuda"
    three = f"{GPU},node.resources.requests.cpu=4,{source('org/a-3b')},{names}"
    render("--set", f"{three},{source('org/a-3b', 1)}")
    assert "expected more than 10.1Gi for org/a-3b (3b in its name), org/b-3b (3b in its name)" in refusal(
        "--set", f"{three},{source('org/b-3b', 1)}"
    )


@pytest.mark.parametrize(
    "volume",
    [
        "models.existingClaim=c",
        "models.hostPath=/srv",
        "models.emptyDirSize=120Gi",
        "models.existingClaim=c,models.pull=false",
    ],
)
def test_a_volume_of_its_own_or_a_larger_one_takes_it(render: Render, volume: str) -> None:
    render("--set", f"{GPU},{source('org/llama-70b')},{volume}")


def test_the_pull_knows_the_size_of_its_volume(render: Render) -> None:
    """The file system of an emptyDir does not say its limit."""

    def pull(settings: str) -> Any:
        return head_of(render("--set", settings))["template"]["spec"]["initContainers"][0]["command"]

    assert pull("models.emptyDirSize=1500M") == ["tandem", "pull", DEMO_MODEL, "--volume-bytes", "1500000000"]
    assert pull("models.existingClaim=c") == ["tandem", "pull", DEMO_MODEL]


SIDECAR = "node.pod.containers[0].name=agent,node.pod.containers[0].resources.limits.ephemeral-storage=60Gi"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("node.resources.limits.ephemeral-storage=100Gi", "node.resources"),
        (SIDECAR, "node.resources"),  # Kubernetes sums up what containers say, and takes it for the pod's limit
        (
            f"{SEVERAL},node.onHead=false,node.replicas=1,head.resources.limits.ephemeral-storage=100Gi",
            "head.resources",
        ),
        (
            f"{SEVERAL},nodeGroups[0].name=a,nodeGroups[0].replicas=1,nodeGroups[0].resources.limits.ephemeral-storage=1Gi",
            "nodeGroups[0].resources",
        ),
        (
            f"{SEVERAL},node.onHead=false,nodeGroups[0].name=a,nodeGroups[0].replicas=1,"
            "node.resources.limits.ephemeral-storage=1Gi",
            "node.resources",  # which the group takes
        ),
    ],
)
def test_a_limit_of_local_storage_below_the_weights_is_refused(
    refusal: Callable[..., str], settings: str, named: str
) -> None:
    said = refusal("--set", f"{GPU},{source('org/llama-70b')},models.emptyDirSize=200Gi,{settings}")
    assert f"{named}.limits.ephemeral-storage: expected more than 117.3Gi for org/llama-70b" in said


def test_a_limit_of_local_storage_with_room_renders(render: Render) -> None:
    both = f"{SIDECAR},node.resources.limits.ephemeral-storage=100Gi"
    render("--set", f"{GPU},{source('org/llama-70b')},models.emptyDirSize=200Gi,{both}")


def test_a_pod_too_small_for_the_weights_it_computes_with_is_refused(
    render: Render, refusal: Callable[..., str]
) -> None:
    """Two workers of the demo model, each with weights, pool and process, and /dev/shm."""
    said = refusal("--set", "node.resources.limits.memory=2Gi")
    needed = (2 * (4 * 134_515_008 + (512 << 20) + PROCESS_BYTES) + (256 << 20)) >> 20
    assert (
        f"node.resources.limits.memory: expected more than {needed}Mi over 1 node for weights (the demo model" in said
    )
    render("--set", f"node.resources.limits.memory={needed + 1}Mi")


@pytest.mark.parametrize(
    ("engine", "fits"),
    [("dtype=float32", False), ("dtype=bfloat16", False), ("weights=int8", False), ("weights=int4", True)],
)
def test_memory_counts_the_weights_in_the_dtype_that_computes(
    render: Render, refusal: Callable[..., str], engine: str, fits: bool
) -> None:
    """7.2e9 parameters (the least that 8b may mean) for two workers, in 10 GiB."""
    settings = f"{source('/models/llama-8b')},models.existingClaim=c,node.resources.limits.memory=10Gi"
    arguments = ("--set", f"{settings},cluster.models[0].engine.{engine}")
    if fits:
        render(*arguments)
    else:
        assert "for weights (8b in its name; if an estimate is wrong, say the size in models.weights)" in refusal(
            *arguments
        )


def test_a_checkpoint_in_float32_has_half_the_weights_of_its_size(render: Render, refusal: Callable[..., str]) -> None:
    memory = "models.existingClaim=c,node.resources.limits.memory=16Gi"
    told = f"{source('/models/m')},{memory},models.weights./models/m.size=6Gi"
    assert "expected more than 26556Mi" in refusal("--set", told)
    render("--set", f"{told},models.weights./models/m.bytesPerWeight=4")


def test_all_ranks_of_a_worker_need_memory_of_one_node(render: Render, refusal: Callable[..., str]) -> None:
    """Together the nodes have enough; a worker is on one."""
    nodes = f"{SEVERAL},node.replicas=3,node.resources.limits.memory=12Gi,cluster.models[0].decode.tp=2"
    model = f"{source('/models/m-8b')},models.existingClaim=c,cluster.models[0].engine.dtype=bfloat16"
    said = refusal("--set", f"{nodes},{model}")
    assert (
        "node.resources.limits.memory: expected more than 14.3Gi beside /dev/shm: a worker of cluster.models[0]" in said
    )
    render("--set", f"{nodes},{model},node.resources.limits.memory=16Gi")


def test_gpus_hold_their_weights_themselves(render: Render) -> None:
    render("--set", f"{GPU},{source('/models/llama-405b')},models.existingClaim=c,node.resources.limits.memory=16Gi")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "models.weights.other.size=1Gi",
            f"models.weights: expected sources of cluster.models ({DEMO_MODEL}), got other",
        ),
        ("models.weights.smollm2-135m.size=big", "/models/weights/smollm2-135m/size"),
        ("models.weights.smollm2-135m.bytesPerWeight=2", "/models/weights/smollm2-135m"),
        ("models.image.reference=r/m", "cluster.models[0].source: expected a folder below /models, which models.image"),
        (
            f"models.image.reference=r/m,models.existingClaim=c,{source('/models/m')}",
            "models: expected one of existingClaim, hostPath and image.reference",
        ),
    ],
)
def test_what_contradicts_is_refused(refusal: Callable[..., str], settings: str, message: str) -> None:
    assert message in refusal("--set", settings)


def test_a_model_in_an_image_is_mounted_read_only_and_nothing_is_written_there(render: Render) -> None:
    settings = f"models.image.reference=registry.example.com/llama:1,{source('/models/llama')}"
    manifests = render("--set", f"{settings},global.imageRegistry=mirror.example.com")
    head = head_of(manifests)
    assert volumes_of(head)["models"]["image"] == {
        "reference": "mirror.example.com/llama:1",
        "pullPolicy": "IfNotPresent",
    }
    assert "initContainers" not in head["template"]["spec"]
    container = container_of(head)
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    written = {each["name"]: each.get("value") for each in container["env"]}
    assert (written["XDG_CACHE_HOME"], written["XDG_DATA_HOME"]) == ("/home/tandem/.cache", "/home/tandem/.data")
    assert cluster_spec(manifests).models[0].source == "/models/llama"


def test_an_older_cluster_has_no_image_volumes(refusal: Callable[..., str]) -> None:
    said = refusal("--set", f"models.image.reference=r/m,{source('/models/m')}", "--kube-version", "1.30.2")
    assert "models.image.reference: expected none before Kubernetes 1.31" in said


def test_the_chart_and_the_pull_agree_on_the_demo_model() -> None:
    text = (CHART / "templates" / "_weights.tpl").read_text()
    assert f"$disk = {PACKAGED[DEMO_MODEL].pull_bytes}.0" in text
    assert f"{PROCESS_BYTES}.0" in (CHART / "templates" / "_capacity.tpl").read_text()
