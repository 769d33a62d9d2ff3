"""Settings of encryption and of who is let in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tandem.config.auth import AuthSpec
from tandem.config.frozen import Frozen


class TlsSpec(Frozen):
    """PEM files, at the same paths on every host. Both sides of a connection present `cert`, which `ca` signed.

    `{role}` in a path stands for the role of the process that reads it: controller, router, worker or admin.
    """

    cert: Annotated[str, Field(min_length=1, description="Certificate.")]
    key: Annotated[str, Field(min_length=1, description="Not encrypted.")]
    ca: Annotated[
        str, Field(min_length=1, description="A CA of this cluster alone, because host names are not verified.")
    ]

    def of(self, role: str) -> TlsSpec:
        return TlsSpec(**{name: path.replace("{role}", role) for name, path in self.model_dump().items()})


class EdgeTlsSpec(Frozen):
    """PEM files of the client-facing ports, HTTP and gRPC. Reread when they change."""

    cert: Annotated[str, Field(min_length=1, description="With the intermediate certificates.")]
    key: Annotated[str, Field(min_length=1, description="Not encrypted.")]
    client_ca: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="CA that must have signed the client's certificate; unset: clients need none."
    )


class SecuritySpec(Frozen):
    auth: AuthSpec = AuthSpec()
    tls: TlsSpec | None = Field(
        None,
        description="Mutual TLS on every internal TCP port (docs/security.md): router to worker, KV plane, admin, Ray. "
        "`tandem certs init` creates the files.",
    )
    allow_plaintext: bool = Field(
        False,
        description="Without tls, internal ports must be on loopback. true: control.admin_host and transfer.bind_host "
        "may be other addresses, and everyone who reaches them can control the cluster and read its traffic.",
    )
