"""The calls of Kubernetes' API that a rollout and the scale adapter need, made as the pod's ServiceAccount."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.model import NODE_GROUP_LABEL, Role
from tandem.errors import ConfigError, UnavailableError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 15.0
COMPONENT = "app.kubernetes.io/component"
TEMPLATE = "tandem/template"  # an annotation: of which template the pod is
DEFAULT_GROUP = "nodes"  # of pods without a label of their group
POOLS = "pools.tandem.dev"
MERGE_PATCH = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Pod:
    """`component`: that of its label; of a node `node/GROUP`."""

    name: str
    uid: str
    component: str
    template: str
    is_ready: bool
    is_ending: bool

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Pod:
        metadata = found["metadata"]
        conditions = found.get("status", {}).get("conditions") or ()
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            component=_component(metadata.get("labels") or {}),
            template=(metadata.get("annotations") or {}).get(TEMPLATE, ""),
            is_ready=any(each["type"] == "Ready" and each["status"] == "True" for each in conditions),
            is_ending="deletionTimestamp" in metadata,
        )


def _component(labels: Mapping[str, str]) -> str:
    component = labels.get(COMPONENT, "")
    return f"node/{labels.get(NODE_GROUP_LABEL, DEFAULT_GROUP)}" if component == "node" else component


@dataclass(frozen=True, slots=True)
class Pool:
    """A pools.tandem.dev object: how many workers of a role a model should have. `version`: of this state of it."""

    name: str
    uid: str
    version: str
    generation: int
    created: str
    model: str
    role: Role
    replicas: int | None
    status: Mapping[str, Any]

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Pool:
        metadata, spec = found["metadata"], found["spec"]
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            version=metadata["resourceVersion"],
            generation=metadata.get("generation", 0),
            created=metadata.get("creationTimestamp", ""),
            model=spec["model"],
            role=Role(spec["role"]),
            replicas=spec.get("replicas"),
            status=found.get("status") or {},
        )


class KubernetesApi:
    """Pods and Pools of a release of the chart. `account`: folder with `token` and `ca.crt`, which the kubelet
    renews."""

    def __init__(self, server: str, namespace: str, release: str, account: Path = ACCOUNT) -> None:
        self._pods = f"{server}/api/v1/namespaces/{namespace}/pods"
        self._pool_objects = f"{server}/apis/tandem.dev/v1alpha1/namespaces/{namespace}/pools"
        self._release = release
        self._selector = f"app.kubernetes.io/instance={release},app.kubernetes.io/part-of=tandem"
        self._account = account

    @classmethod
    def of_this_pod(cls, namespace: str, release: str, environ: Mapping[str, str] = os.environ) -> KubernetesApi:
        """Raises ConfigError outside Kubernetes."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError("KUBERNETES_SERVICE_HOST: expected the API server's address, which a pod has, got none")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", namespace, release)

    def list(self) -> list[Pod]:
        """Raises ConfigError if the account may not, UnavailableError."""
        query = urllib.parse.urlencode({"labelSelector": self._selector})
        found = self._call("GET", f"{self._pods}?{query}", needs="list and delete of pods")
        return [Pod.parse(each) for each in found["items"]]

    def delete(self, pod: Pod) -> None:
        """With the pod's own grace period. Nothing if it is gone, or another pod has its name."""
        body = {"preconditions": {"uid": pod.uid}}
        self._call("DELETE", f"{self._pods}/{pod.name}", body, needs="list and delete of pods", ignored=(404, 409))

    def pools(self) -> Sequence[Pool]:
        """Raises ConfigError if the account may not, or Kubernetes does not know them; UnavailableError."""
        found = self._call("GET", self._pool_objects, needs=f"list of {POOLS}", ignored=(404,))
        if "items" not in found:
            raise ConfigError(
                f"the API server has no {POOLS}: apply the chart's files/{POOLS}.yaml, as docs/deploy.md says"
            )
        return [Pool.parse(each) for each in found["items"] if each["spec"]["release"] == self._release]

    def set_replicas(self, pool: Pool, replicas: int) -> None:
        """Nothing if the Pool has changed since it was read, or is gone."""
        self._patch(pool, "", {"spec": {"replicas": replicas}})

    def set_status(self, pool: Pool, status: Mapping[str, Any]) -> None:
        """Likewise."""
        self._patch(pool, "/status", {"status": status})

    def _patch(self, pool: Pool, part: str, body: Mapping[str, Any]) -> None:
        url, body = f"{self._pool_objects}/{pool.name}{part}", {"metadata": {"resourceVersion": pool.version}, **body}
        self._call("PATCH", url, body, needs=f"patch of {POOLS}{part}", ignored=(404, 409), kind=MERGE_PATCH)

    def _call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        needs: str,
        ignored: tuple[int, ...] = (),
        kind: str = "application/json",
    ) -> Any:
        """`needs`: the rights, for a message."""
        headers = {"Accept": "application/json", "Content-Type": kind}
        try:
            context = None
            if url.startswith("https:"):
                headers["Authorization"] = f"Bearer {(self._account / 'token').read_text().strip()}"
                context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code in ignored:
                return {}
            if error.code == 403:
                raise ConfigError(
                    f"serviceAccount: the API server refuses to {method} ({error.code}): expected a Role with {needs}"
                ) from None
            raise UnavailableError(f"the API server answered {error.code} ({error.reason})") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnavailableError(f"the API server does not answer: {error}") from None
