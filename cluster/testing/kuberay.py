"""Which pods of a release a changed manifest replaces: a model of KubeRay 1.6 and 1.7 and of Kubernetes' Deployments,
in which the chart's own Job runs. A pod of the model is ready as soon as it is made.

Of KubeRay it has what `GenerateHashWithoutReplicasAndWorkersToDelete`, `shouldRecreatePodsForUpgrade` and
`reconcilePods` decide.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.kubernetes import Pod
from cluster.rollout import Rollout, Wanted
from cluster.spec.changes import changed_fields, is_live
from tandem.config.spec import ClusterSpec

Manifest = Mapping[str, Any]
Manifests = Mapping[tuple[str, str], Manifest]  # by kind and name

MUTED = ("replicas", "minReplicas", "maxReplicas")  # of a group; autoscalers change them
MUTED_IN_POD = ("tolerations", "schedulingGates")  # since 1.6: Kueue adds them
OF_EVERY_POD = ("rayVersion", "authOptions")  # what KubeRay reads of the cluster to make any pod
JOB_TIMEOUT_S = 10.0


def spec_hash(spec: Manifest) -> str:
    """What KubeRay writes on the head pod that it makes, and compares with `upgradeStrategy: Recreate`."""
    kept = copy.deepcopy({name: value for name, value in spec.items() if name != "upgradeStrategy"})
    for group in (kept["headGroupSpec"], *kept.get("workerGroupSpecs", ())):
        for name in MUTED_IN_POD:
            group["template"]["spec"].pop(name, None)
        for name in MUTED:
            group.pop(name, None)
        group.get("scaleStrategy", {}).pop("workersToDelete", None)
    return hashlib.sha1(json.dumps(kept, sort_keys=True).encode(), usedforsecurity=False).hexdigest()


def desired_replicas(group: Manifest) -> int:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
    wanted: int = min(max(group.get("replicas", least), least), most)
    return wanted


@dataclass(frozen=True, slots=True)
class RunningPod:
    """`made_of`: all that its controller read to make it. `recreate_hash`: of a head pod."""

    pod: Pod
    owner: str
    made_of: Any
    recreate_hash: str = ""

    @property
    def name(self) -> str:
        """As users call it: head, a node's group, or the rest of its Deployment's name."""
        return self.pod.component.removeprefix("node/")


class Namespace:
    """With one release of the chart."""

    def __init__(self) -> None:
        self.pods: dict[str, RunningPod] = {}  # by uid
        self._manifests: Manifests = {}
        self._numbers = itertools.count()

    async def apply(self, manifests: Manifests) -> None:
        """What follows from `helm upgrade`."""
        former, self._manifests = self._manifests, manifests
        self._reconcile()
        for key, job in manifests.items():
            if key[0] == "Job" and key not in former:
                await self._roll(job)

    def list(self) -> list[Pod]:
        """As the Job asks."""
        return [each.pod for each in self.pods.values()]

    def delete(self, pod: Pod) -> None:
        """As the Job asks."""
        self.pods.pop(pod.uid, None)
        self._reconcile()

    def outdated(self) -> Iterator[RunningPod]:
        """Ray's pods that would be made otherwise now, and nothing makes them anew."""
        for cluster in self._of_kind("RayCluster"):
            wanted = {component: made_of for component, made_of, _ in _groups(cluster)}
            for each in self.pods.values():
                if each.pod.component in wanted and each.made_of != wanted[each.pod.component]:
                    yield each

    def _of_kind(self, kind: str) -> tuple[Manifest, ...]:
        return tuple(manifest for (each, _), manifest in self._manifests.items() if each == kind)

    def _reconcile(self) -> None:
        owners = self._of_kind("Deployment") + self._of_kind("RayCluster")
        self._remove(lambda each: each.owner not in {owner["metadata"]["name"] for owner in owners})
        for deployment in self._of_kind("Deployment"):
            self._deployment(deployment)
        for cluster in self._of_kind("RayCluster"):
            self._ray_cluster(cluster)

    def _deployment(self, deployment: Manifest) -> None:
        """One with an autoscaler keeps the number of its pods, within the limits."""
        owner, template = deployment["metadata"]["name"], deployment["spec"]["template"]
        count = deployment["spec"].get("replicas")
        if count is None:
            scaler = next(s for s in self._of_kind("HorizontalPodAutoscaler") if s["metadata"]["name"] == owner)["spec"]
            running = sum(each.owner == owner for each in self.pods.values())
            count = min(max(running, scaler["minReplicas"]), scaler["maxReplicas"])
        self._remove(lambda each: each.owner == owner and each.made_of != template)
        self._scale(owner, template["metadata"]["labels"]["app.kubernetes.io/component"], count, template, template)

    def _ray_cluster(self, cluster: Manifest) -> None:
        owner, spec = cluster["metadata"]["name"], cluster["spec"]
        wanted_hash = spec_hash(spec)
        heads = [each for each in self.pods.values() if each.owner == owner and each.recreate_hash]
        if spec["upgradeStrategy"]["type"] == "Recreate" and any(each.recreate_hash != wanted_hash for each in heads):
            self._remove(lambda each: each.owner == owner)
        for component, made_of, group in _groups(cluster):
            if component == "head":
                self._scale(owner, component, 1, group["template"], made_of, wanted_hash)
            else:
                grows_only = bool(spec.get("enableInTreeAutoscaling"))  # the autoscaler alone chooses whom to delete
                self._scale(owner, component, desired_replicas(group), group["template"], made_of, keep=grows_only)

    def _scale(
        self,
        owner: str,
        component: str,
        count: int,
        template: Manifest,
        made_of: Any,
        recreate_hash: str = "",
        *,
        keep: bool = False,
    ) -> None:
        running = [uid for uid, each in self.pods.items() if (each.owner, each.pod.component) == (owner, component)]
        for uid in [] if keep else running[count:]:
            del self.pods[uid]
        for _ in range(count - len(running)):
            uid = f"{component}-{next(self._numbers)}"
            metadata = {**template["metadata"], "name": uid, "uid": uid}
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            pod = Pod.parse({"metadata": metadata, "status": status})
            self.pods[uid] = RunningPod(pod, owner, copy.deepcopy(made_of), recreate_hash)

    def _remove(self, which: Callable[[RunningPod], bool]) -> None:
        for uid in [uid for uid, each in self.pods.items() if which(each)]:
            del self.pods[uid]

    async def _roll(self, job: Manifest) -> None:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        asked = [each.removeprefix("--pods=") for each in container["args"] if each.startswith("--pods=")]

        async def none_unready() -> str:
            return ""

        wanted = [Wanted.parse(each) for each in asked]
        await Rollout(self, none_unready, wanted, JOB_TIMEOUT_S, poll_s=0.001).run()


def _groups(cluster: Manifest) -> Iterator[tuple[str, Any, Manifest]]:
    """The component of each group's pods as their labels name it, what KubeRay makes them of, and the group."""
    spec = cluster["spec"]
    of_head = {
        name: value
        for name, value in spec.items()
        if name not in ("headGroupSpec", "workerGroupSpecs", "upgradeStrategy")
    }
    yield "head", (_made_of(spec["headGroupSpec"]), of_head), spec["headGroupSpec"]
    of_node = {name: spec.get(name) for name in OF_EVERY_POD} | {"keeps": "gcsFaultToleranceOptions" in spec}
    for group in spec.get("workerGroupSpecs", ()):
        yield f"node/{group['groupName']}", (_made_of(group), of_node), group


def _made_of(group: Manifest) -> Any:
    return {name: group.get(name) for name in ("template", "rayStartParams", "labels")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of an upgrade. Pods by name: head, a node's group, router or valkey.

    `unreached`: pods that stay as they are though the release says otherwise. `applied`: fields of the cluster's spec,
    or a Secret, that running pods take over; `refused`: fields that the running head cannot. `restarted`: pods.
    """

    replaced: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    unreached: frozenset[str] = frozenset()
    applied: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    restarted: int = 0


def outcome(before: Manifests, after: Manifests) -> Outcome:
    """Of `helm upgrade` from one rendered release to another."""
    return asyncio.run(_outcome(before, after))


async def _outcome(before: Manifests, after: Manifests) -> Outcome:
    namespace = Namespace()
    await namespace.apply(before)
    former = dict(namespace.pods)
    await namespace.apply(after)
    now = namespace.pods
    gone = Counter(former[uid].name for uid in former.keys() - now.keys())
    new = Counter(now[uid].name for uid in now.keys() - former.keys())
    replaced = gone.keys() & new.keys()
    changed = () if "head" in replaced else tuple(changed_fields(_cluster_spec(before), _cluster_spec(after)))
    return Outcome(
        replaced=frozenset(replaced),
        added=frozenset(new.keys() - replaced),
        removed=frozenset(gone.keys() - replaced),
        unreached=frozenset(each.name for each in namespace.outdated()),
        applied=tuple(field for field in changed if is_live(field)),
        refused=tuple(field for field in changed if not is_live(field)),
        restarted=sum(min(gone[name], new[name]) for name in replaced),
    )


def _cluster_spec(manifests: Manifests) -> ClusterSpec:
    """As the head reads it."""
    (name,) = (name for kind, name in manifests if kind == "RayCluster")
    text = manifests["ConfigMap", name]["data"]["cluster.yaml"]
    text = text.replace("${POD_IP}", "10.0.0.1").replace("${TANDEM_REDIS_URL}", "rediss://redis:6379")
    return ClusterSpec.model_validate(yaml.safe_load(text))


def secret_outcome(manifests: Manifests, secret: str) -> Outcome:
    """Of other contents of a Secret: the kubelet renews mounted files, but no variables and no file of a `subPath`."""
    namespace = Namespace()
    asyncio.run(namespace.apply(manifests))
    pods = namespace.pods.values()
    renewed = {each.name for each in pods if any(_mounted(each.made_of, secret))}
    unreached = {each.name for each in pods if any(_variables(each.made_of, secret))}
    if not renewed and not unreached:
        raise ValueError(f"{secret}: no pod uses such a Secret")
    return Outcome(unreached=frozenset(unreached), applied=() if unreached else (secret,))


def _mappings(found: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(found, dict):
        yield found
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ():
        yield from _mappings(each)


def _variables(made_of: Any, secret: str) -> Iterator[object]:
    mappings = list(_mappings(made_of))
    for each in mappings:
        if any(
            isinstance(each.get(key), dict) and each[key].get("name") == secret for key in ("secretKeyRef", "secretRef")
        ):
            yield each
    volumes = {each["name"] for each in mappings if "name" in each and secret in _secret_names(each)}
    yield from (each for each in mappings if each.get("subPath") and each.get("name") in volumes)


def _mounted(made_of: Any, secret: str) -> Iterator[object]:
    return (each for each in _mappings(made_of) if secret in _secret_names(each))


def _secret_names(volume: Mapping[str, Any]) -> list[str]:
    source = volume.get("secret")
    return [source["secretName"]] if isinstance(source, dict) and "secretName" in source else []
