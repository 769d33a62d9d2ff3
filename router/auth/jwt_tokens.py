"""Finds the principal of a JWT. Signature and claims are verified once, then cached until the token expires."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jwt
from jwt.exceptions import PyJWTError

from router.auth.jwks import SigningKey, SigningKeys
from router.auth.principal import TENANT_SHAPE, Principal
from tandem.config.auth import JwtSpec, LimitsSpec
from tandem.errors import Unauthenticated, UnavailableError

MAX_TOKEN_CHARS = 8192
MAX_NAMES = 1000
MAX_CACHED = 4096
_SUBJECT = re.compile(r"[\x21-\x7e]{1,200}")

Claims = Mapping[str, Any]


class UnknownSigningKey(Unauthenticated):
    """The token is signed with a key that is not loaded (yet)."""


class JwtVerifier:
    """Uses the keys of the last `set_keys`."""

    def __init__(self, spec: JwtSpec) -> None:
        self._spec = spec
        self._keys: SigningKeys | None = None
        self._verified: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()  # until when, Unix seconds

    def set_keys(self, keys: SigningKeys) -> None:
        """Empties the cache: a token whose key is gone is no longer valid."""
        self._keys = keys
        self._verified.clear()

    def principal(self, token: str, now_unix_s: float) -> Principal:
        """Raises Unauthenticated with the reason; UnknownSigningKey if newer keys might help."""
        if len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated(f"authorization: expected a token of at most {MAX_TOKEN_CHARS} characters")
        digest = hashlib.sha256(token.encode()).digest()
        if (known := self._verified.get(digest)) is not None:
            principal, until_unix_s = known
            if now_unix_s < until_unix_s:
                return principal
            del self._verified[digest]
            raise Unauthenticated("authorization: the token has expired")
        principal, until_unix_s = self._verify(token)
        self._verified[digest] = principal, until_unix_s
        while len(self._verified) > MAX_CACHED:
            self._verified.popitem(last=False)
        return principal

    def _verify(self, token: str) -> tuple[Principal, float]:
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key.public,
                algorithms=list(key.algorithms),
                issuer=self._spec.issuer,
                audience=self._spec.audience,
                leeway=self._spec.leeway_s,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (PyJWTError, ValueError, TypeError, RecursionError) as error:
            # Only the error's type: its text could repeat parts of the token.
            raise Unauthenticated(f"authorization: the token is not valid: {type(error).__name__}") from None
        return self._principal(claims), float(claims["exp"]) + self._spec.leeway_s

    def _key(self, key_id: object) -> SigningKey:
        if self._keys is None:
            raise UnavailableError("the issuer's signing keys could not be fetched yet; retry later")
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        found = self._keys.get(str(key_id))
        if found is None:
            raise UnknownSigningKey("authorization: the token is signed with a key that its issuer has not published")
        return found

    def _principal(self, claims: Claims) -> Principal:
        named, subject = self._spec.claims, str(claims["sub"])
        if not _SUBJECT.fullmatch(subject):
            raise _bad_claim("sub", "1 to 200 printable characters")
        tenant = claims.get(named.tenant)
        if not isinstance(tenant, str) or not TENANT_SHAPE.fullmatch(tenant):
            raise _bad_claim(named.tenant, "1 to 64 letters, digits and _.:@-")
        limits = self._spec.limits
        return Principal(
            key_id=f"jwt:{subject}",
            tenant=tenant,
            models=_names(claims, named.models),
            priorities=_names(claims, named.priorities),
            limits=LimitsSpec(
                requests_per_minute=_count(claims, named.requests_per_minute, limits.requests_per_minute),
                tokens_per_minute=_count(claims, named.tokens_per_minute, limits.tokens_per_minute),
            ),
            admin=named.admin is not None and claims.get(named.admin) is True,
        )


def _names(claims: Claims, claim: str | None) -> frozenset[str] | None:
    """A missing claim allows no names; None: the operator configured no such claim."""
    if claim is None:
        return None
    given = claims.get(claim, [])
    names = given.split() if isinstance(given, str) else given
    if not isinstance(names, list) or len(names) > MAX_NAMES or not all(isinstance(each, str) for each in names):
        raise _bad_claim(claim, f"at most {MAX_NAMES} names, in a list or between spaces")
    return frozenset(names)


def _count(claims: Claims, claim: str | None, default: int | None) -> int | None:
    if claim is None:
        return default
    given = claims.get(claim)
    if not isinstance(given, int) or isinstance(given, bool) or not 0 < given <= 1 << 40:
        raise _bad_claim(claim, "a whole number above 0")
    return given


def _bad_claim(claim: str, expected: str) -> Unauthenticated:
    return Unauthenticated(f"authorization: the token's claim {claim!r}: expected {expected}")
