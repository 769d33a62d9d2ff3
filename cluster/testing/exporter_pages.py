"""Pages of kube-state-metrics and of NVIDIA's DCGM exporter, for machines without Kubernetes and without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cluster.testing.alert_rules import NAMESPACE, RELEASE
from cluster.testing.scraper import Target

HEAD, NEXT_HEAD, NODE = f"{RELEASE}-head-x1", f"{RELEASE}-head-x2", f"{RELEASE}-nodes-worker-x1"
PHASES = ("Pending", "Succeeded", "Failed", "Unknown", "Running")


class Pods:
    """The page of kube-state-metrics about the pods of a release: `phase` and `restarts` by pod."""

    def __init__(self) -> None:
        self.phase = {HEAD: "Running"}
        self.restarts: dict[str, int] = {}

    def target(self, url: str) -> Target:
        labels = {"namespace": "monitoring", "job": "kube-state-metrics", "instance": "kube-state-metrics:8080"}
        return Target(url, labels, honors=True)

    def text(self) -> str:
        lines = ["# TYPE kube_pod_status_phase gauge"]
        for pod, now in self.phase.items():
            of = f'namespace="{NAMESPACE}",pod="{pod}",uid="{pod[-2:]}"'
            lines += [f'kube_pod_status_phase{{{of},phase="{each}"}} {int(each == now)}' for each in PHASES]
        lines.append("# TYPE kube_pod_container_status_restarts_total counter")
        for pod in self.phase:
            of = f'namespace="{NAMESPACE}",pod="{pod}",uid="{pod[-2:]}",container="ray-head"'
            lines.append(f"kube_pod_container_status_restarts_total{{{of}}} {self.restarts.get(pod, 0)}")
        return "\n".join([*lines, ""])


class Dcgm:
    """The page of NVIDIA's exporter about one GPU of a node pod. `xid`: the driver's last error, 0 without one."""

    xid = 0

    def target(self, url: str) -> Target:
        labels = {"namespace": "gpu-operator", "job": "nvidia-dcgm-exporter", "pod": "nvidia-dcgm-exporter-x1"}
        return Target(url, labels | {"instance": "node-1:9400"})

    def text(self) -> str:
        of_gpu = 'gpu="0",UUID="GPU-0",pci_bus_id="00000000:01:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3"'
        of_pod = f'Hostname="node-1",container="ray-node",namespace="{NAMESPACE}",pod="{NODE}"'
        return (
            "# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.\n"
            "# TYPE DCGM_FI_DEV_XID_ERRORS gauge\n"
            f"DCGM_FI_DEV_XID_ERRORS{{{of_gpu},{of_pod}}} {self.xid}\n"
        )


@contextmanager
def served(page: Pods | Dcgm) -> Iterator[Target]:
    """Serves the page on this machine, and yields where a scraper finds it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.text().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield page.target(f"http://127.0.0.1:{server.server_port}/metrics")
        server.shutdown()
