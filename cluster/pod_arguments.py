"""Arguments of the chart's processes that call the controller and the API server: the rollout, the scale adapter."""

from __future__ import annotations

import argparse

from cluster.cli.admin_client import Admin
from cluster.kubernetes import KubernetesApi
from tandem.config.security import TlsSpec


def add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--release", required=True, help="the Helm release")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT", help="the controller's admin address")
    parser.add_argument("--api", metavar="URL", help="the API server (default: that of this pod)")
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"security.tls.{name}, with the role admin")


def admin_of(given: argparse.Namespace) -> Admin:
    files = {"cert": given.tls_cert, "key": given.tls_key, "ca": given.tls_ca}
    return Admin(given.controller, TlsSpec(**files) if given.tls_cert else None)


def kubernetes_of(given: argparse.Namespace) -> KubernetesApi:
    """Raises ConfigError outside Kubernetes."""
    if given.api:
        return KubernetesApi(given.api, given.namespace, given.release)
    return KubernetesApi.of_this_pod(given.namespace, given.release)
