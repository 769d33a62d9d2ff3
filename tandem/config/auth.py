"""Configuration of authentication and rate limits (`security.auth`; docs/security.md)."""

from __future__ import annotations

import hashlib
import ipaddress
from enum import StrEnum
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen

PerMinute = Annotated[int, Field(ge=1, le=1 << 40)]
Name = Annotated[str, Field(min_length=1, max_length=500)]

STDOUT = "stdout"  # an audit_log that is no file

# Asymmetric algorithms only: the router holds public keys, so a stolen router configuration cannot sign tokens.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def key_hash(key: str) -> str:
    """The value of security.auth.api_key_sha256 for this key."""
    return hashlib.sha256(key.encode()).hexdigest()


class AuthMode(StrEnum):
    REQUIRED = "required"
    NONE = "none"


class LimitsSpec(Frozen):
    requests_per_minute: PerMinute | None = Field(None, description="Unset: no limit.")
    tokens_per_minute: PerMinute | None = Field(None, description="Prompt and output tokens together; unset: no limit.")


class ClaimsSpec(Frozen):
    """Names of the JWT claims that Tandem reads. If a claim is named here and a token lacks it, the token allows
    nothing."""

    tenant: Name = Field("tenant", description="Tenant of the subject, which separates prefix caches.")
    models: Name | None = Field(
        None, description="Models the token may use: a list, or names separated by spaces; unset: all."
    )
    priorities: Name | None = Field(
        None, description="Priority classes the token may use, in the same form; unset: all."
    )
    requests_per_minute: Name | None = Field(None, description="Limit of the subject; unset: jwt.limits.")
    tokens_per_minute: Name | None = Field(None, description="Limit of the subject; unset: jwt.limits.")
    admin: Name | None = Field(
        None, description="true: the token may read metrics and the dashboard; unset: no token may."
    )


class JwtSpec(Frozen):
    """JWTs of an OpenID Connect provider, or of any issuer that signs with a private key."""

    issuer: Name = Field(description="Required value of the `iss` claim.")
    audience: Name = Field(description="Value that the `aud` claim must equal or contain.")
    jwks_file: Name | None = Field(
        None, description="File of the issuer's public keys (RFC 7517); reread when it changes."
    )
    jwks_url: Name | None = Field(None, description="URL of the public keys instead: https, or http on loopback.")
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = Field(
        ("RS256", "ES256", "EdDSA"), description="Accepted signature algorithms."
    )
    leeway_s: Annotated[float, Field(ge=0, le=300)] = Field(30.0, description="Allowed clock skew.")
    claims: ClaimsSpec = ClaimsSpec()
    limits: LimitsSpec = Field(LimitsSpec(), description="Limits of a subject whose token sets none.")

    @model_validator(mode="after")
    def _one_source(self) -> JwtSpec:
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("security.auth.jwt.jwks_file: expected exactly one of jwks_file and jwks_url")
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
    """Authentication of a router's callers (docs/security.md)."""

    mode: AuthMode | None = Field(
        None,
        description="Unset: required if keys_file, api_key_sha256 or jwt is set; otherwise none, and the router must "
        "listen on loopback.",
    )
    keys_file: Name | None = Field(
        None, description="File of API keys, written by `tandem keys`, on every router host; reread when it changes."
    )
    api_key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None,
        description="SHA-256, in hex, of one key of your own choice, which `tandem up --api-key` sets. Its holder may "
        "do everything; its tenant is `default`.",
    )
    jwt: JwtSpec | None = None
    max_stale_s: Annotated[float, Field(gt=0)] = Field(
        900.0,
        description="If keys_file, jwt.jwks_file or jwt.jwks_url cannot be read for this long, keys are refused with "
        "503, because a revocation would not be seen.",
    )
    audit_log: Name | None = Field(
        None,
        description="File, or `stdout`, for one JSON line per request and per change that an operator asks of the "
        "controller: the caller and the outcome.",
    )
    audit_lossless: bool = Field(
        False,
        description="true: while a file audit_log cannot be written, calls are refused with 503, and what is not "
        "written yet waits. false: lines are lost then, and their number is logged.",
    )
    audit_chained: bool = Field(
        False,
        description="true: each line of a file audit_log vouches for the lines before it; `tandem audit verify` finds "
        "the first one that was altered, removed or moved.",
    )
    audit_key_file: Name | None = Field(
        None,
        description="File with the key of audit_chained, of at least 32 bytes; without the key no chain can be made "
        "anew. Unset: SHA-256 without a key.",
    )

    @property
    def required(self) -> bool:
        return self.mode is AuthMode.REQUIRED or self._has_means

    @property
    def _has_means(self) -> bool:
        return self.keys_file is not None or self.api_key_sha256 is not None or self.jwt is not None

    @model_validator(mode="after")
    def _means_fit_mode(self) -> AuthSpec:
        if self.mode is AuthMode.REQUIRED and not self._has_means:
            raise ValueError(
                "security.auth.keys_file: expected keys_file, api_key_sha256 or jwt, because security.auth.mode is "
                "required"
            )
        if self.mode is AuthMode.NONE and self._has_means:
            raise ValueError("security.auth.mode: expected required (or unset) with keys_file, api_key_sha256 or jwt")
        return self

    @model_validator(mode="after")
    def _audit_fits(self) -> AuthSpec:
        for field, is_set in (("audit_lossless", self.audit_lossless), ("audit_chained", self.audit_chained)):
            if is_set and self.audit_log in (None, STDOUT):
                raise ValueError(
                    f"security.auth.{field}: expected a file as security.auth.audit_log, got {self.audit_log or 'none'}"
                )
        if self.audit_key_file is not None and not self.audit_chained:
            raise ValueError("security.auth.audit_key_file: expected together with security.auth.audit_chained")
        return self

    def check_hosts(self, hosts: dict[str, str]) -> None:
        """`hosts` maps a field to the host it names. Raises ValueError if unauthenticated clients could connect from
        other hosts."""
        for field, host in hosts.items():
            if not self.required and self.mode is None and not is_loopback(host):
                raise ValueError(
                    f"{field}: {host} is not loopback, and callers are not authenticated: set "
                    "security.auth.keys_file (`tandem keys create` makes one) or security.auth.jwt, or set "
                    "`security.auth.mode: none` to accept all callers"
                )
