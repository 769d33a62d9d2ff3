"""Nobody is let in unasked from beyond loopback unless that is written out; contradictions are named."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.spec.loader import load_spec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

JWT = {"issuer": "i", "audience": "a", "jwks_file": "f"}


def spec(host: str = "127.0.0.1", **auth: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"router": {"http_host": host}, "security": {"auth": auth}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_nobody_is_asked_unless_keys_are_given(host: str) -> None:
    assert not spec(host).security.auth.required
    assert spec(host, keys_file="k").security.auth.required
    assert spec(host, mode="required", jwt=JWT).security.auth.required


@pytest.mark.parametrize("field", ["control.admin_host", "transfer.bind_host"])
@pytest.mark.parametrize("host", ["10.0.0.1", "auto", "example.org"])
def test_internal_ports_beyond_loopback_need_tls_or_the_written_opt_out(field: str, host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(None, {field: host}, environ={})
    assert refused.value.message.startswith(f"{field}: {host} is not loopback")
    assert "`security.allow_plaintext: true`" in refused.value.message
    load_spec(None, {field: host, "security.allow_plaintext": True}, environ={})
    tls = {f"security.tls.{each}": "f.pem" for each in ("cert", "key", "ca")}
    load_spec(None, {field: host} | tls, environ={})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""])
def test_beyond_loopback_the_start_is_refused_with_field_and_remedy(host: str) -> None:
    for field in ("http_host", "grpc_host"):
        with pytest.raises(ConfigError) as refused:
            load_spec(None, {f"router.{field}": host}, environ={})
        assert refused.value.message.startswith(f"router.{field}: {host} is not loopback")
        assert "`security.auth.mode: none`" in refused.value.message
        assert "tandem keys create" in refused.value.message
    assert not spec(host, mode="none").security.auth.required
    assert spec(host, keys_file="k").security.auth.required
    assert spec(host, jwt=JWT).security.auth.required


@pytest.mark.parametrize(
    ("auth", "field"),
    [
        ({"mode": "required"}, "security.auth.keys_file"),
        ({"mode": "none", "keys_file": "k"}, "security.auth.mode"),
        ({"mode": "none", "jwt": JWT}, "security.auth.mode"),
        ({"mode": "maybe"}, "security.auth.mode"),
        ({"jwt": JWT | {"jwks_url": "https://x"}}, "security.auth.jwt.jwks_file"),
        ({"jwt": {"issuer": "i", "audience": "a"}}, "security.auth.jwt.jwks_file"),
        ({"jwt": {"issuer": "i", "audience": "a", "jwks_url": "http://example.org"}}, "security.auth.jwt.jwks_url"),
        ({"jwt": {"issuer": "i", "audience": "a", "jwks_url": "file:///etc/passwd"}}, "security.auth.jwt.jwks_url"),
        ({"jwt": {"issuer": "i", "audience": "a", "jwks_url": "https://["}}, "security.auth.jwt.jwks_url"),
        ({"jwt": JWT | {"algorithms": ["HS256"]}}, "security.auth.jwt.algorithms.0"),
        ({"jwt": JWT | {"algorithms": ["none"]}}, "security.auth.jwt.algorithms.0"),
        ({"jwt": JWT | {"algorithms": []}}, "security.auth.jwt.algorithms"),
        ({"jwt": JWT | {"limits": {"requests_per_minute": 0}}}, "security.auth.jwt.limits.requests_per_minute"),
        ({"key_file": "k"}, "security.auth.key_file"),
    ],
)
def test_what_is_wrong_is_named(auth: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_spec(None, {"security": {"auth": auth}}, environ={})
    assert refused.value.message.startswith(f"{field}: "), refused.value.message
