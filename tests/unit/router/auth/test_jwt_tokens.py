"""JWTs: signatures, claims, rollover of keys, and known forgeries."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from router.auth import jwks as jwks_module
from router.auth import key_refresh
from router.auth.authenticator import Authenticator
from router.auth.call_gate import CallGate
from router.auth.jwks import MAX_JWKS_BYTES, fetch_jwks, parse_jwks
from router.auth.jwt_tokens import JwtVerifier, UnknownSigningKey
from router.auth.key_refresh import KeyRefresh
from router.auth.principal import AccessLevel
from tandem.clock import SystemClock
from tandem.config.auth import AuthSpec, ClaimsSpec, JwtSpec, LimitsSpec
from tandem.errors import ConfigError, PermissionDenied, Unauthenticated, UnavailableError
from tandem.testing.models import FakeClock

ISSUER, AUDIENCE = "https://login.example.org", "tandem"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
ALLOWED = ("RS256", "ES256", "EdDSA")


def jwk(key: Any, kid: str, **more: str) -> dict[str, Any]:
    kinds: dict[type, Any] = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
    algorithm = next((found for kind, found in kinds.items() if isinstance(key, kind)), OKPAlgorithm)
    return {**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid, **more}


KEYS = [jwk(RSA, "r"), jwk(EC, "e"), jwk(ED, "o")]


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def spec(**more: Any) -> JwtSpec:
    return JwtSpec(**{"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": "unused"} | more)


def verifier(*keys: dict[str, Any], **more: Any) -> JwtVerifier:
    made = JwtVerifier(spec(**more))
    made.set_keys(parse_jwks(jwks(*(keys or KEYS)), ALLOWED, "test"))
    return made


def token(key: Any = RSA, kid: str | None = "r", algorithm: str = "RS256", **claims: Any) -> str:
    body = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "tenant": "acme", "exp": time.time() + 600,
    } | claims  # fmt: skip
    body = {name: value for name, value in body.items() if value is not None}
    return jwt.encode(body, key, algorithm=algorithm, headers={} if kid is None else {"kid": kid})


def forged(header: dict[str, Any], signature: bytes = b"") -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "tenant": "acme", "exp": time.time() + 600}
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize(("key", "kid", "algorithm"), [(RSA, "r", "RS256"), (EC, "e", "ES256"), (ED, "o", "EdDSA")])
def test_tokens_of_each_type_of_key_are_valid(key: Any, kid: str, algorithm: str) -> None:
    found = verifier().principal(token(key, kid, algorithm), time.time())
    assert (found.key_id, found.tenant, found.admin, found.models) == ("jwt:ann", "acme", False, None)


def test_claims_set_models_classes_limits_and_the_admin_flag() -> None:
    named = ClaimsSpec(
        tenant="https://example.org/tenant", models="models", priorities="classes", admin="ops",
        requests_per_minute="rpm", tokens_per_minute=None,
    )  # fmt: skip
    found = verifier(claims=named, limits=LimitsSpec(tokens_per_minute=9)).principal(
        token(**{"https://example.org/tenant": "t"}, models=["a", "b"], classes="batch other", ops=True, rpm=5),
        time.time(),
    )
    assert found.tenant == "t"
    assert (found.models, found.priorities, found.admin) == (frozenset("ab"), frozenset({"batch", "other"}), True)
    assert found.limits == LimitsSpec(requests_per_minute=5, tokens_per_minute=9)


@pytest.mark.parametrize(
    "claims",
    [
        {"tenant": None}, {"tenant": "a b"}, {"tenant": 5}, {"sub": None}, {"sub": "a\nb"}, {"sub": "x" * 201},
        {"aud": "other"}, {"aud": None}, {"iss": "https://evil.example.org"}, {"iss": None}, {"exp": None},
        {"exp": 1}, {"nbf": 1 << 40}, {"iat": 1 << 40}, {"models": 5}, {"models": [5]}, {"rpm": None}, {"rpm": "many"},
        {"rpm": True}, {"rpm": 0},
    ],
)  # fmt: skip
def test_a_claim_that_is_missing_or_wrong_is_refused(claims: dict[str, Any]) -> None:
    named = ClaimsSpec(models="models", requests_per_minute="rpm")
    shown: dict[str, Any] = {"rpm": 5, "models": "a"} | claims
    with pytest.raises(Unauthenticated, match="authorization: "):
        verifier(claims=named).principal(token(**shown), time.time())


def test_a_named_claim_that_is_missing_allows_nothing() -> None:
    assert verifier(claims=ClaimsSpec(models="models")).principal(token(), time.time()).models == frozenset()
    assert not verifier(claims=ClaimsSpec(admin="ops")).principal(token(ops="true"), time.time()).admin


def test_forgeries_are_refused() -> None:
    public = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    by_public_key = forged({"alg": "HS256", "kid": "r"})
    head, body, _ = by_public_key.split(".")
    good = token()
    swapped = ".".join([*good.split(".")[:1], token(tenant="rival").split(".")[1], good.split(".")[2]])
    wrong = [
        forged({"alg": "none"}), forged({"alg": "none", "kid": "r"}), forged({"alg": "RS256", "kid": "r"}),
        by_public_key, f"{head}.{body}.{base64.urlsafe_b64encode(public[:32]).decode().rstrip('=')}",
        token(STRANGER), token(STRANGER, kid=None), token(RSA, algorithm="PS256"), token(RSA, algorithm="RS512"),
        token(RSA, kid="e"), token(EC, "r", "ES256"), good[:-4], good + "x", swapped, "a.b.c", "...", "a.b", ".",
        good.replace(".", ".."), forged({"alg": "RS256", "kid": "r", "jwk": KEYS[0]}), "x." * 5000,
        f"{base64.urlsafe_b64encode(b'[' * 6000).decode()}.e30.x", forged({"alg": "RS256", "kid": ["r"]}),
        forged({"alg": "RS256", "kid": "r", "crit": ["x"], "x": 1}),
    ]  # fmt: skip
    checker = verifier()
    for each in wrong:
        with pytest.raises(Unauthenticated) as refused:
            checker.principal(each, time.time())
        assert each not in refused.value.message
        assert "acme" not in refused.value.message


def test_only_public_signing_keys_of_allowed_algorithms_are_taken() -> None:
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "s", "alg": "HS256"}
    keys = parse_jwks(
        jwks(secret, jwk(RSA, "r", alg="RS512"), jwk(EC, "e", use="enc"), {"kty": "RSA", "kid": "b"}, *KEYS[2:]),
        ALLOWED,
        "test",
    )
    assert set(keys) == {"o"}
    private = json.loads(RSAAlgorithm.to_jwk(RSA))
    assert isinstance(parse_jwks(jwks(private), ALLOWED, "test")[""].public, rsa.RSAPublicKey)
    pinned = parse_jwks(jwks(jwk(RSA, "r", alg="PS256")), ("RS256", "PS256"), "test")
    assert pinned["r"].algorithms == ("PS256",)
    for wrong in (b"", b"[]", b"{}", b'{"keys": 5}', b'{"keys": []}', jwks(secret), jwks(*KEYS * 100), b"[" * 100_000):
        with pytest.raises(ConfigError):
            parse_jwks(wrong, ALLOWED, "test")


def test_type_and_curve_of_a_key_decide_its_algorithms_and_not_its_alg() -> None:
    p384, ed448 = jwk(ec.generate_private_key(ec.SECP384R1()), "c"), jwk(Ed448PrivateKey.generate(), "4")
    mixed = jwks({**p384, "alg": "ES256"}, {**KEYS[1], "kty": ["EC"]}, {**KEYS[1], "crv": "P-384"}, ed448)
    assert {kid: key.algorithms for kid, key in parse_jwks(mixed, ALLOWED, "test").items()} == {"4": ("EdDSA",)}
    assert parse_jwks(jwks(p384), ("ES384", "RS256"), "test")["c"].algorithms == ("ES384",)
    assert parse_jwks(jwks(KEYS[0]), ("PS256", "RS512", "ES256"), "test")["r"].algorithms == ("RS512", "PS256")


def test_a_verified_token_is_cached_until_it_expires_or_its_key_is_removed() -> None:
    checker, now = verifier(leeway_s=0), time.time()
    given = token(exp=now + 600)
    first = checker.principal(given, now)
    assert checker.principal(given, now + 599) is first, "the cache returns the same object"
    with pytest.raises(Unauthenticated, match="expired"):
        checker.principal(given, now + 601)
    checker.principal(given, now)
    checker.set_keys(parse_jwks(jwks(KEYS[1]), ALLOWED, "test"))
    with pytest.raises(UnknownSigningKey):
        checker.principal(given, now)


def test_admin_routes_require_the_admin_claim() -> None:
    authenticator = Authenticator(verifier(claims=ClaimsSpec(admin="ops")))
    authenticator.identify(f"Bearer {token(ops=True)}", AccessLevel.ADMIN)
    with pytest.raises(PermissionDenied):
        authenticator.identify(f"Bearer {token()}", AccessLevel.ADMIN)


class _Issuer(HTTPServer):
    """Serves the body that tests set, and counts its requests."""

    body = b""
    status = 200
    asked = 0
    drips: threading.Event | None = None  # its headers come byte by byte until it is set
    body_drips: threading.Event | None = None  # likewise the body

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that close before the end."""


class _Handler(BaseHTTPRequestHandler):
    server: _Issuer

    def do_GET(self) -> None:
        self.server.asked += 1
        if (drips := self.server.drips) is not None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\nx: ")
            while not drips.wait(0.01):
                self.wfile.write(b"x")
            self.wfile.write(b"\r\n\r\n" + self.server.body)
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        while (body_drips := self.server.body_drips) is not None and not body_drips.wait(0.01):
            self.wfile.write(b" ")
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the tests' output free of requests."""


@pytest.fixture
def issuer() -> Iterator[_Issuer]:
    server = _Issuer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_fetching_is_bounded_and_follows_no_redirect(issuer: _Issuer) -> None:
    url = f"http://127.0.0.1:{issuer.server_port}/keys"
    issuer.body = jwks(*KEYS)
    assert set(fetch_jwks(url, ALLOWED)) == {"r", "e", "o"}
    issuer.body = b" " * (MAX_JWKS_BYTES + 1)
    with pytest.raises(ConfigError, match="at most"):
        fetch_jwks(url, ALLOWED)
    for status in (302, 404, 500):
        issuer.status = status
        with pytest.raises(ConfigError, match="jwks_url"):
            fetch_jwks(url, ALLOWED)
    with pytest.raises(ConfigError):
        fetch_jwks("http://127.0.0.1:1/", ALLOWED)


async def test_keys_roll_over_and_an_unreachable_issuer_leaves_the_old_keys(issuer: _Issuer) -> None:
    url = f"http://127.0.0.1:{issuer.server_port}/keys"
    clock = FakeClock()
    auth = AuthSpec(jwt=JwtSpec(issuer=ISSUER, audience=AUDIENCE, jwks_url=url))
    calls = CallGate(auth, "router-0", None, clock, lambda refused: None)

    async def authenticate(given: str) -> str:
        call = calls.begin("GET /x", AccessLevel.CALLER, "", "", "")
        await calls.authenticate(call, f"Bearer {given}")
        return call.tenant

    issuer.status = 503
    with pytest.raises(UnavailableError):
        await authenticate(token())
    assert calls._keys is not None
    issuer.status, issuer.body = 200, jwks(KEYS[0])
    await calls._keys.refresh()
    assert await authenticate(token()) == "acme"
    issuer.body = jwks(KEYS[0], KEYS[1])
    asked = issuer.asked
    with pytest.raises(Unauthenticated):
        await authenticate(token(EC, "e", "ES256"))
    assert issuer.asked == asked, "an unknown key does not cause a fetch within RETRY_S"
    clock.advance(10.0)
    assert await authenticate(token(EC, "e", "ES256")) == "acme", "the new key is fetched when a token names it"
    issuer.status = 500
    clock.advance(10.0)
    with pytest.raises(Unauthenticated):
        await authenticate(token(ED, "o", "EdDSA"))
    assert await authenticate(token()) == "acme"
    await calls.close()


async def test_an_issuer_that_drips_bytes_holds_no_caller(issuer: _Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_refresh, "FETCH_TIMEOUT_S", 0.2)
    clock, spec = (
        FakeClock(),
        JwtSpec(issuer=ISSUER, audience=AUDIENCE, jwks_url=f"http://127.0.0.1:{issuer.server_port}"),
    )
    fetched = key_refresh.FetchedKeys(spec, JwtVerifier(spec), clock, 900.0)
    issuer.drips, issuer.body = threading.Event(), jwks(*KEYS)
    async with asyncio.timeout(60):
        await asyncio.gather(*(fetched.refresh() for _ in range(3)))
        clock.advance(10.0)
        await fetched.refresh()
        assert (issuer.asked, fetched.current_s) == (1, 0.0)
        issuer.drips.set()
        while fetched.current_s == 0.0:
            clock.advance(10.0)
            await fetched.refresh()
            await asyncio.sleep(0.01)
    assert issuer.asked == 2


def test_the_body_of_an_issuers_answer_has_a_time_limit(issuer: _Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks_module, "FETCH_TIMEOUT_S", 0.1)
    issuer.body_drips = threading.Event()
    with pytest.raises(ConfigError, match=r"expected the whole answer within 0\.1 s"):
        fetch_jwks(f"http://127.0.0.1:{issuer.server_port}", ALLOWED)
    issuer.body_drips.set()


def test_a_jwks_file_is_read_at_the_start_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    auth = AuthSpec(jwt=JwtSpec(issuer=ISSUER, audience=AUDIENCE, jwks_file=str(path)))
    with pytest.raises(ConfigError, match="jwks_file"):
        KeyRefresh(auth, SystemClock())
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="jwks_file"):
        KeyRefresh(auth, SystemClock())
    path.write_bytes(jwks(*KEYS))
    assert KeyRefresh(auth, SystemClock()).authenticator.identify(f"Bearer {token()}").tenant == "acme"
