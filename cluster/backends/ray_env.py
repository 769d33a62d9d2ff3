"""The environment of a Ray cluster of our own. Ray reads it when it is imported, so this module must not import Ray."""

from __future__ import annotations

import os
import secrets

from tandem.config.spec import TlsSpec
from tandem.rpc.identity import Identity

_LOOPBACK = {
    # Else Ray turns 127.0.0.1 into the host's own address and listens on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # No port can have this number: the autoscaler's metrics, which nobody here reads, would be open to anybody.
    "AUTOSCALER_METRIC_PORT": "-1",
}


def prepare_own_ray(tls: TlsSpec | None) -> None:
    """For this process and its children: loopback only; a token that every caller must know, one for this cluster, so
    that none is left in the home folder; and mutual TLS where `security.tls` is given. The user's own choices stand."""
    for name, value in _LOOPBACK.items():
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
