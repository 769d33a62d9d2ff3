"""The TLS context of the edge, without gRPC: the process of `tandem up` checks the files with it before a start."""

from __future__ import annotations

import ssl

from tandem.config.security import EdgeTlsSpec
from tandem.rpc.tls import check_certificates, read_file, use_key_pair

FIELD = "router.tls"


def edge_context(spec: EdgeTlsSpec) -> ssl.SSLContext:
    """The context for HTTP. Raises ConfigError."""
    for name, path in (("cert", spec.cert), ("key", spec.key), ("client_ca", spec.client_ca)):
        if path is not None:
            read_file(path, f"{FIELD}.{name}")
    check_certificates(spec.cert, f"{FIELD}.cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    fill_context(context, spec)
    return context


def fill_context(context: ssl.SSLContext, spec: EdgeTlsSpec) -> None:
    """Loads the files into a context that may be in use. Raises ConfigError."""
    use_key_pair(context, spec.cert, spec.key, FIELD)
    if spec.client_ca is not None:
        check_certificates(spec.client_ca, f"{FIELD}.client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=spec.client_ca)
