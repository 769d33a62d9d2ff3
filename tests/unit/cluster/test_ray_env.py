"""What a Ray cluster of our own finds in its environment."""

from __future__ import annotations

import os

import pytest

from cluster.backends.ray_env import prepare_local_ray
from tandem.config.security import TlsSpec

FILES = TlsSpec(cert="/c/{role}.pem", key="/c/{role}.key", ca="/c/ca.pem")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_it_listens_on_loopback_and_wants_a_token_that_is_new_each_time(environ: dict[str, str]) -> None:
    prepare_local_ray(None)
    first = environ["RAY_AUTH_TOKEN"]
    assert (environ["RAY_AUTH_MODE"], len(first)) == ("token", 64)
    assert environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert "RAY_USE_TLS" not in environ
    del environ["RAY_AUTH_MODE"]
    prepare_local_ray(None)
    assert environ["RAY_AUTH_TOKEN"] != first


def test_with_security_tls_it_shows_the_controllers_certificate(environ: dict[str, str]) -> None:
    prepare_local_ray(FILES)
    assert {name: value for name, value in environ.items() if "TLS" in name} == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": "/c/controller.pem",
        "RAY_TLS_SERVER_KEY": "/c/controller.key",
        "RAY_TLS_CA_CERT": "/c/ca.pem",
    }


def test_the_users_own_choices_stand(environ: dict[str, str]) -> None:
    chosen = {"RAY_AUTH_MODE": "k8s", "RAY_USE_TLS": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    environ |= chosen
    prepare_local_ray(FILES)
    assert {name: environ[name] for name in chosen} == chosen
    assert "RAY_AUTH_TOKEN" not in environ
    assert "RAY_TLS_SERVER_CERT" not in environ
