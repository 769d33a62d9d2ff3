"""What the chart promises its pods, read by the very function that a head reads it with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.spec.requirements import VARIABLE, Requirement, check_requirements
from tandem.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "examples"

Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]


def promised(manifests: Manifests, tmp_path: Path) -> tuple[str, ...]:
    """What `check_requirements` says in a pod that has everything it asks for, after an empty one missed each."""
    text = manifests["ConfigMap", "test-tandem"]["data"]["requirements.yaml"]
    listed = tmp_path / "requirements.yaml"
    listed.write_text(text)
    missing = missing_from({VARIABLE: str(listed)})
    entries = [Requirement.model_validate(entry) for entry in yaml.safe_load(text)]
    assert [each for each in entries if f"{each.value}: expected {each.what} at" not in missing] == []
    environ = {VARIABLE: str(listed)} | {each.variable: "given" for each in entries if each.variable}
    given = [{**each.model_dump(), "path": each.path and put_below(tmp_path, each.path)} for each in entries]
    listed.write_text(yaml.safe_dump(given))
    return check_requirements(environ)


def missing_from(environ: dict[str, str]) -> str:
    try:
        check_requirements(environ)
    except ConfigError as error:
        if error.field == VARIABLE:
            raise  # a head could not read the list
        return str(error)
    return ""


def put_below(folder: Path, path: str) -> str:
    found = folder / path.lstrip("/")
    found.parent.mkdir(parents=True, exist_ok=True)
    found.touch()
    return str(found)


def test_every_example_promises_what_a_head_can_read_and_find(example: Manifests, tmp_path: Path) -> None:
    told = promised(example, tmp_path)
    head = example["RayCluster", "test-tandem"]["spec"]["headGroupSpec"]["template"]["spec"]
    secrets = [volume["secret"]["secretName"] for volume in head["volumes"] if "secret" in volume]
    assert [name for name in secrets if not any(f"Secret {name} with" in each for each in told)] == []


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("laptop", "", ()),
        ("gpu-node", "", ("the model in the model volume (claim llama-weights)",)),
        (
            "gpu-node",
            "cluster.models[0].source=/models/a: b [c]",
            ("the model in the model volume (claim llama-weights)",),
        ),
        (
            "laptop",
            "models.hubTokenSecret.name=hub,models.hostPath=/srv/models,cluster.models[0].source=/models/mine",
            ("Secret hub with token", "the model in the model volume (hostPath /srv/models)"),
        ),
        (
            "two-racks",
            "",
            (
                "Secret tandem-keys with keys.yaml",
                "Secret tandem-valkey with password",
                "the model in the model volume (claim llama-weights)",
            ),
        ),
        (
            "external-redis",
            "",
            ("Secret tandem-keys with keys.yaml", "Secret prefix-redis with url", "Secret prefix-redis-ca with ca.crt"),
        ),
        (
            "secured",
            "",
            (
                *(f"Secret test-tandem-edge-tls with tls.{kind}" for kind in ("crt", "key")),
                *(f"Secret test-tandem-head-tls with {file}" for file in ("tls.crt", "tls.key", "ca.crt")),
                "Secret tandem-keys with keys.yaml",
                "Secret tandem-valkey with password",
                "Secret tandem-valkey-tls with ca.crt",
            ),
        ),
    ],
)
def test_what_is_missing_is_named_by_secret_and_volume(
    render: Render, name: str, settings: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    manifests = render("--values", str(EXAMPLES / f"{name}.yaml"), *(["--set", settings] if settings else []))
    assert promised(manifests, tmp_path) == expected
