"""Deployment files that no chart renders: the annotated spec, the Dockerfile, the Ray launcher file."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import ray
import yaml

from tandem.config.spec import ClusterSpec

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


def test_the_annotated_spec_is_the_default_cluster_with_every_key_written_out() -> None:
    written = yaml.safe_load((DEPLOY / "tandem.yaml").read_text())
    assert ClusterSpec.model_validate(written) == ClusterSpec()
    assert written == json.loads(ClusterSpec().model_dump_json())


def test_the_image_carries_every_package_of_the_wheel_and_runs_as_nobody_special() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == set(packages)
    context = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{package}" for package in packages} <= set(context)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}" in context
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages[-3:] == ["cpu", "vllm", "cuda"]
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert text.index("USER 10001") < text.index("ENTRYPOINT")


def test_the_ray_launcher_file_is_what_ray_up_accepts() -> None:
    config = yaml.safe_load((DEPLOY / "ray" / "cluster.yaml").read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
    for source in config["file_mounts"].values():
        assert source == "dist" or (ROOT / source).exists()


def test_no_deployment_file_binds_a_wildcard_address() -> None:
    for path in [*DEPLOY.rglob("*"), *(ROOT / "helm").rglob("*")]:
        if path.is_file() and path.suffix != ".pyc":
            assert "0.0.0.0" not in path.read_text(), path
