"""The environment of a local Ray cluster. Ray reads it when imported, so this module must not import Ray."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from cluster.devices import VISIBLE, narrowed
from tandem.config.security import TlsSpec
from tandem.rpc.identity import Identity

_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without this, Ray replaces 127.0.0.1 by the host's address and listens on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # An impossible port: disables the autoscaler's metrics, which nothing reads and which would be unprotected.
    "AUTOSCALER_METRIC_PORT": "-1",
}


def prepare_local_ray(tls: TlsSpec | None, devices: Sequence[int] | None = None) -> None:
    """Secures Ray for this process and its children; variables that the user has set keep their values.

    Ray listens on loopback only, requires a token (a fresh one, so that Ray stores none in the home folder) and, if
    `security.tls` is set, mutual TLS. With `devices` (ordinals), Ray sees only these GPUs.
    """
    if devices is not None:
        os.environ[VISIBLE] = narrowed(devices, os.environ.get(VISIBLE))
    for name, value in _LOCAL.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if tls is not None and "RAY_USE_TLS" not in os.environ:
        own = tls.of(Identity.CONTROLLER)
        os.environ["RAY_USE_TLS"] = "1"
        os.environ["RAY_TLS_SERVER_CERT"] = own.cert
        os.environ["RAY_TLS_SERVER_KEY"] = own.key
        os.environ["RAY_TLS_CA_CERT"] = own.ca
