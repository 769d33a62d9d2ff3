"""The part of the configuration that says who may call (`security.auth`; docs/security.md)."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen

PerMinute = Annotated[int, Field(ge=1, le=1 << 40)]
Name = Annotated[str, Field(min_length=1, max_length=500)]

# Whoever can check one of these cannot sign: what a router knows is of no use to a thief.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AuthMode(StrEnum):
    REQUIRED = "required"
    NONE = "none"


class LimitsSpec(Frozen):
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = Field(None, description="Of prompts and answers together.")


class ClaimsSpec(Frozen):
    """Which claim of a JWT says what. A claim that is named here and missing in a token allows nothing."""

    tenant: Name = "tenant"
    models: Name | None = Field(None, description="A list of names, or names between spaces; unset: every model.")
    priorities: Name | None = Field(None, description="Likewise, of priority classes; unset: every class.")
    requests_per_minute: Name | None = Field(None, description="Unset: jwt.limits.")
    tokens_per_minute: Name | None = Field(None, description="Unset: jwt.limits.")
    admin: Name | None = Field(None, description="true: may read metrics and the dashboard. Unset: no JWT may.")


class JwtSpec(Frozen):
    """JWTs of an OpenID Connect provider, or of any other issuer that signs with a private key."""

    issuer: Name = Field(description="What `iss` must be.")
    audience: Name = Field(description="What `aud` must be, or hold.")
    jwks_file: Name | None = Field(None, description="The issuer's public keys (RFC 7517); read again when it changes.")
    jwks_url: Name | None = Field(None, description="Or where they are fetched: https, or http on loopback.")
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256", "ES256", "EdDSA")
    leeway_s: Annotated[float, Field(ge=0, le=300)] = Field(30.0, description="How far clocks may be apart.")
    claims: ClaimsSpec = ClaimsSpec()
    limits: LimitsSpec = Field(LimitsSpec(), description="Of each subject whose token names none.")

    @model_validator(mode="after")
    def _one_source(self) -> JwtSpec:
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("security.auth.jwt.jwks_file: expected either jwks_file or jwks_url")
        if self.jwks_url is not None:
            try:
                url = urlsplit(self.jwks_url)
                safe = url.scheme == "https" or (url.scheme == "http" and is_loopback(url.hostname or ""))
            except ValueError:
                safe = False
            if not safe:
                raise ValueError("security.auth.jwt.jwks_url: expected an https URL (http only on loopback)")
        return self


class AuthSpec(Frozen):
    """Who may call a router (docs/security.md)."""

    mode: AuthMode | None = Field(
        None,
        description="Unset: required where keys_file or jwt is given; otherwise none, and the router listens on "
        "loopback only.",
    )
    keys_file: Name | None = Field(
        None, description="API keys, as `tandem keys` writes them; on every host with a router. Read when it changes."
    )
    jwt: JwtSpec | None = None
    audit_log: Name | None = Field(
        None, description="File, or `stdout`, that gets one JSON line for each request: who asked, and what came of it."
    )

    @property
    def required(self) -> bool:
        return self.mode is AuthMode.REQUIRED or self.keys_file is not None or self.jwt is not None

    @model_validator(mode="after")
    def _means_fit_mode(self) -> AuthSpec:
        has_means = self.keys_file is not None or self.jwt is not None
        if self.mode is AuthMode.REQUIRED and not has_means:
            raise ValueError("security.auth.keys_file: expected keys_file or jwt, as security.auth.mode is required")
        if self.mode is AuthMode.NONE and has_means:
            raise ValueError("security.auth.mode: expected required (or unset) with keys_file or jwt")
        return self

    def check_hosts(self, hosts: dict[str, str]) -> None:
        """Args: `hosts` maps the field to the host it names. Raises ValueError: strangers could call."""
        for field, host in hosts.items():
            if not self.required and self.mode is None and not is_loopback(host):
                raise ValueError(
                    f"{field}: {host} is not loopback, and nobody who calls there is asked who they are: set "
                    "security.auth.keys_file (`tandem keys create` makes one) or security.auth.jwt, or write "
                    "`security.auth.mode: none` to let everybody in"
                )
