"""An issuer's public keys (RFC 7517): read from a file, or fetched from its URL within limits of time and size."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from tandem.errors import ConfigError

FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 1 << 20
MAX_KEYS = 256
_PIECE_BYTES = 64 << 10
# The public members of a key. An issuer may have published its private key by mistake, which we do not keep.
_PUBLIC = frozenset({"kty", "crv", "x", "y", "n", "e"})
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


@dataclass(frozen=True, slots=True)
class SigningKey:
    """`algorithms`: those that a token signed with this key may name."""

    public: Any
    algorithms: tuple[str, ...]


SigningKeys = Mapping[str, SigningKey]


def parse_jwks(data: bytes, allowed: tuple[str, ...], source: str) -> SigningKeys:
    """The keys by key id. Skips entries that are not signing keys of an allowed algorithm. Raises ConfigError."""
    try:
        entries = [each for each in json.loads(data)["keys"] if isinstance(each, dict)]
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
    public = {name: value for name, value in entry.items() if name in _PUBLIC}
    try:  # `alg` is not passed: key type and curve decide the algorithm. PyJWK does that for OKP with Ed25519 only.
        key = PyJWK(public, algorithm="EdDSA" if public.get("kty") == "OKP" else None)
    except (PyJWTError, KeyError, ValueError, TypeError):
        return None
    usable = _RSA if key.algorithm_name in _RSA else (key.algorithm_name,)
    algorithms = tuple(each for each in usable if each in allowed and entry.get("alg", each) == each)
    return SigningKey(key.key, algorithms) if algorithms else None


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
    """Blocks: for the body FETCH_TIMEOUT_S, and as long for each earlier step of the connection. Raises ConfigError."""
    field = "security.auth.jwt.jwks_url"
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "tandem"})
    try:
        with opener.open(request, timeout=FETCH_TIMEOUT_S) as response:
            data = _read(response)
    except (OSError, ValueError) as error:  # urllib's own errors are OSErrors
        raise ConfigError(f"{field}: {url}: {error}", field=field) from None
    return parse_jwks(_within(data, field), allowed, f"{field}: {url}")


def _read(response: HTTPResponse) -> bytes:
    """Up to MAX_JWKS_BYTES and a little more. Raises TimeoutError."""
    data, end_s = b"", time.monotonic() + FETCH_TIMEOUT_S
    while len(data) <= MAX_JWKS_BYTES and (some := response.read1(_PIECE_BYTES)):
        data += some
        if time.monotonic() > end_s:
            raise TimeoutError(f"expected the whole answer within {FETCH_TIMEOUT_S:g} s")
    return data


def _within(data: bytes, field: str) -> bytes:
    if len(data) > MAX_JWKS_BYTES:
        raise ConfigError(f"{field}: expected at most {MAX_JWKS_BYTES} bytes", field=field)
    return data


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The operator configured one address; its answer cannot redirect to another."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None
