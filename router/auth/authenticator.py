"""Finds the principal of an Authorization header, for every edge."""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable

from router.auth.api_keys import KeyTable
from router.auth.jwt_tokens import MAX_TOKEN_CHARS, JwtVerifier
from router.auth.principal import SPEC_KEY, AccessLevel, Principal
from tandem.config.auth import key_hash
from tandem.errors import PermissionDenied, Unauthenticated

_MAX_HEADER_CHARS = MAX_TOKEN_CHARS + 16


class Authenticator:
    """Does no I/O: its owner replaces `keys` and the verifier's keys while it runs.

    Args: `spec_key_sha256` is security.auth.api_key_sha256.
    """

    def __init__(
        self,
        jwt: JwtVerifier | None = None,
        spec_key_sha256: str | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.keys: KeyTable | None = None
        self._spec_key_sha256 = spec_key_sha256
        self.jwt = jwt
        self._now_unix_s = now_unix_s

    def identify(self, authorization: str | None, access: AccessLevel = AccessLevel.CALLER) -> Principal:
        """Raises Unauthenticated, PermissionDenied; UnknownSigningKey if newer keys of the issuer might help."""
        principal = self._principal(_credential(authorization, access))
        if access is not AccessLevel.CALLER and not principal.admin:
            raise PermissionDenied(f"key {principal.key_id}: expected one with the admin flag here")
        return principal

    def _principal(self, credential: str) -> Principal:
        if self._spec_key_sha256 is not None and hmac.compare_digest(key_hash(credential), self._spec_key_sha256):
            return SPEC_KEY
        now_unix_s = self._now_unix_s()
        if self.jwt is not None and "." in credential:  # an API key has no dot
            return self.jwt.principal(credential, now_unix_s)
        found = None if self.keys is None else self.keys.principal(credential, now_unix_s)
        if found is None:
            raise Unauthenticated("authorization: expected a valid API key; this one is unknown, expired or revoked")
        return found


def _credential(authorization: str | None, access: AccessLevel) -> str:
    """The key or token. HTTP Basic, with the key as password, is for admin routes only, which browsers and scrapers
    read: a browser also attaches it to requests of other sites, which must not generate."""
    if authorization is None:
        raise Unauthenticated("authorization: expected `Bearer` and an API key or token, got nothing")
    if len(authorization) > _MAX_HEADER_CHARS:
        raise Unauthenticated(f"authorization: expected at most {_MAX_HEADER_CHARS} characters")
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic" if access is AccessLevel.ADMIN:
            try:
                return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                raise Unauthenticated("authorization: expected base64 of `user:key` after Basic") from None
        case _:
            raise Unauthenticated("authorization: expected the scheme Bearer")
