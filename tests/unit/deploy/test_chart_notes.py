"""What `helm install` says at its end: commands that work as they are printed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHART = Path(__file__).resolve().parents[3] / "helm" / "tandem"
PLAIN = "http://127.0.0.1:8000/v1/models"


def notes(helm: str, *arguments: str) -> str:
    command = [helm, "install", "test", str(CHART), "--namespace", "serving", "--dry-run=client", *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return said.partition("NOTES:")[2]


def curl_of(said: str) -> str:
    (line,) = [line.strip() for line in said.splitlines() if line.strip().startswith("curl")]
    return line


def test_without_keys_and_tls_a_plain_call_and_a_word_about_it(helm: str) -> None:
    said = notes(helm)
    assert curl_of(said) == f"curl {PLAIN}"
    assert "No API key is required" in said


@pytest.mark.parametrize(
    "settings",
    [
        "auth.existingSecret=keys,test.apiKeySecret.name=key",
        "cluster.security.auth.jwt.issuer=https://a,cluster.security.auth.jwt.audience=b,"
        "cluster.security.auth.jwt.jwks_url=https://c",
    ],
)
def test_where_keys_are_asked_for_the_call_has_one(helm: str, settings: str) -> None:
    said = notes(helm, "--set", settings)
    assert curl_of(said) == f'curl -H "Authorization: Bearer $TANDEM_API_KEY" {PLAIN}'
    assert "No API key is required" not in said


def test_with_tls_the_call_names_what_is_in_the_certificate(helm: str) -> None:
    said = notes(helm, "--values", str(CHART / "examples" / "secured.yaml"))
    assert "get secret test-tandem-edge-tls -o jsonpath='{.data.ca\\.crt}'" in said
    call = curl_of(said)
    assert call.startswith("curl --cacert ca.crt --connect-to ::127.0.0.1: -H ")
    assert call.endswith(" https://test-tandem-http.serving.svc:8000/v1/models")
    own = notes(helm, "--set", "tls.edge.existingSecret=edge,tls.edge.serverName=llm.example.com")
    assert curl_of(own).endswith(" https://llm.example.com:8000/v1/models")
