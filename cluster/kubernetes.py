"""The calls of Kubernetes' API that a rollout needs, made as the pod's ServiceAccount."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.spec import NODE_GROUP_LABEL
from tandem.errors import ConfigError, UnavailableError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 15.0
COMPONENT = "app.kubernetes.io/component"
TEMPLATE = "tandem/template"  # an annotation: of which template the pod is
DEFAULT_GROUP = "nodes"  # of pods without a label of their group


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


class KubernetesApi:
    """Pods of a release of the chart. `account`: folder with `token` and `ca.crt`, which the kubelet renews."""

    def __init__(self, server: str, namespace: str, release: str, account: Path = ACCOUNT) -> None:
        self._pods = f"{server}/api/v1/namespaces/{namespace}/pods"
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
        found = self._call("GET", f"{self._pods}?{urllib.parse.urlencode({'labelSelector': self._selector})}")
        return [Pod.parse(each) for each in found["items"]]

    def delete(self, pod: Pod) -> None:
        """With the pod's own grace period. Nothing if it is gone, or another pod has its name."""
        self._call("DELETE", f"{self._pods}/{pod.name}", {"preconditions": {"uid": pod.uid}}, ignored=(404, 409))

    def _call(self, method: str, url: str, body: Any = None, ignored: tuple[int, ...] = ()) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
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
                    f"serviceAccount: the API server refuses to {method} pods ({error.code}): expected a Role with "
                    "list and delete of pods"
                ) from None
            raise UnavailableError(f"the API server answered {error.code} ({error.reason})") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnavailableError(f"the API server does not answer: {error}") from None
