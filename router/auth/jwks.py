"""An issuer's public keys (RFC 7517): parsed from a file, or fetched from its URL within limits of time and size."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from tandem.errors import ConfigError

FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 1 << 20
MAX_KEYS = 256
# Which algorithms a key of each kind can serve. Symmetric keys ("oct") are none of ours.
_OF_KIND = {"RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "OKP": ("EdDSA",)}
_OF_CURVE = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",)}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """`algorithms`: those that a token signed with it may name."""

    public: Any
    algorithms: tuple[str, ...]


SigningKeys = Mapping[str, SigningKey]


def parse_jwks(data: bytes, allowed: tuple[str, ...], source: str) -> SigningKeys:
    """By key id. What is no public signing key of an allowed algorithm is left out. Raises ConfigError."""
    try:
        given = json.loads(data)["keys"]
        entries = [each for each in given if isinstance(each, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{source}: expected a JSON object with a list `keys`") from None
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{source}: expected at most {MAX_KEYS} keys, got {len(entries)}")
    found = {str(entry.get("kid", "")): key for entry in entries if (key := _signing_key(entry, allowed)) is not None}
    if not found:
        raise ConfigError(f"{source}: expected a public signing key for one of {', '.join(allowed)}, found none")
    return found


def _signing_key(entry: dict[str, Any], allowed: tuple[str, ...]) -> SigningKey | None:
    if entry.get("use", "sig") != "sig":
        return None
    able = _OF_CURVE.get(str(entry.get("crv"))) if entry.get("kty") == "EC" else _OF_KIND.get(str(entry.get("kty")))
    algorithms = tuple(each for each in able or () if each in allowed and entry.get("alg", each) == each)
    if not algorithms:
        return None
    # Only the public half, should somebody have published both.
    public = {name: value for name, value in entry.items() if name in ("kty", "crv", "x", "y", "n", "e")}
    try:
        return SigningKey(PyJWK(public, algorithm=algorithms[0]).key, algorithms)
    except (PyJWTError, ValueError, TypeError):
        return None


def read_jwks(path: Path, allowed: tuple[str, ...]) -> SigningKeys:
    """Raises ConfigError."""
    field = "security.auth.jwt.jwks_file"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JWKS_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}", field=field) from None
    return parse_jwks(_within(data, field), allowed, f"{field}: {path}")


def fetch_jwks(url: str, allowed: tuple[str, ...]) -> SigningKeys:
    """Blocks for up to several FETCH_TIMEOUT_S. Raises ConfigError."""
    field = "security.auth.jwt.jwks_url"
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "tandem"})
    try:
        with opener.open(request, timeout=FETCH_TIMEOUT_S) as response:
            data = response.read(MAX_JWKS_BYTES + 1)
    except (OSError, ValueError) as error:  # urllib's own errors are OSErrors
        raise ConfigError(f"{field}: {url}: {error}", field=field) from None
    return parse_jwks(_within(data, field), allowed, f"{field}: {url}")


def _within(data: bytes, field: str) -> bytes:
    if len(data) > MAX_JWKS_BYTES:
        raise ConfigError(f"{field}: expected at most {MAX_JWKS_BYTES} bytes", field=field)
    return data


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The operator named one address; whoever answers there may not name another."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None
