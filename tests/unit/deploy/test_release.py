"""A release: the same bytes for the same commit, and what its script pushes and signs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cluster import certificates
from cluster.spec.resolve import free_ports

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
EPOCH = "1700000000"
REGISTRY = "registry.example.com/owner/tandem"
IMAGES = {"cpu": "tandem", "cuda": "tandem-cuda", "router": "tandem-router", "vllm": "tandem-vllm"}

# Says what it is asked, and what docker says of what it pushed.
DOCKER = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
[ "$2" = imagetools ] && { echo sha256:base; exit; }
while [ "$1" != --metadata-file ]; do shift; done
printf '{\\n  "containerimage.digest": "sha256:%064d"\\n}' "$(wc -l <"$CALLS")" >"$2"
"""
COSIGN = '#!/bin/sh\necho "$@" >>"$CALLS"\n'


@dataclass(frozen=True)
class Checkout:
    """A copy of what the script reads, as a repository of its own, so that nothing is written into this one."""

    root: Path
    environment: dict[str, str]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "deploy" / "release" / "release.sh", *words],
            env={**self.environment, **environment},
            check=False,
            capture_output=True,
            text=True,
        )

    def release(self, *words: str, **environment: str) -> None:
        done = self.run(*words, **environment)
        assert done.returncode == 0, done.stderr

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()

    @property
    def chart(self) -> Path:
        (found,) = (self.root / "dist").glob("*.tgz")
        return found


@pytest.fixture
def checkout(tmp_path: Path, helm: str) -> Checkout:
    root, programs = tmp_path / "checkout", tmp_path / "bin"
    for name in ("deploy", "helm", "scripts"):
        shutil.copytree(ROOT / name, root / name, copy_function=shutil.copyfile)  # with times of now
    shutil.copymode(ROOT / "deploy" / "release" / "release.sh", root / "deploy" / "release" / "release.sh")
    shutil.copymode(ROOT / "scripts" / "fetch-helm.sh", root / "scripts" / "fetch-helm.sh")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / ".cache").symlink_to(Path(helm).parents[1])
    programs.mkdir()
    for name, program in (("docker", DOCKER), ("cosign", COSIGN)):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    author = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, **author, "PATH": path, "CALLS": str(root / "calls"), "REGISTRY": REGISTRY}
    environment["GIT_COMMITTER_DATE"] = f"{EPOCH} +0000"
    for command in (["git", "init", "-q"], ["git", "commit", "-q", "--allow-empty", "-m", "test"]):
        subprocess.run(command, cwd=root, env=environment, check=True)
    return Checkout(root, environment)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_tag_that_is_not_the_version_is_refused(checkout: Checkout) -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    checkout.release("check", TAG=f"v{version[1]}")
    assert (
        f"TAG: expected v{version[1]}, the version in pyproject.toml, got v9" in checkout.run("check", TAG="v9").stderr
    )
    chart = checkout.root / "helm" / "tandem" / "Chart.yaml"
    chart.write_text(chart.read_text().replace(f'appVersion: "{version[1]}"', 'appVersion: "9"'))
    assert f"appVersion: expected {version[1]} as in" in checkout.run("check", TAG=f"v{version[1]}").stderr


@pytest.mark.parametrize(
    ("command", "registry", "said"),
    [("chart", "", "expected HOST/PATH"), ("images", "ghcr.io/Owner/x", "expected lower case"), ("puhs", "r", "puhs")],
)
def test_what_the_script_cannot_use_is_refused(checkout: Checkout, command: str, registry: str, said: str) -> None:
    done = checkout.run(command, REGISTRY=registry)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_same_commit_gives_the_same_chart(checkout: Checkout) -> None:
    checkout.release("chart")
    first = sha256(checkout.chart)
    later = time.time() + 3600
    for path in (checkout.root / "helm").rglob("*"):
        os.utime(path, (later, later))
    checkout.release("chart")
    assert sha256(checkout.chart) == first
    with tarfile.open(checkout.chart) as packed:
        assert {member.mtime for member in packed} == {int(EPOCH)}, "the commit's time"


def test_the_chart_has_all_its_files_and_the_images_of_the_release(checkout: Checkout, helm: str) -> None:
    checkout.release("chart")
    source = ROOT / "helm" / "tandem"
    with tarfile.open(checkout.chart) as packed:
        content = {
            member.name.removeprefix("tandem/"): file.read()
            for member in packed
            if (file := packed.extractfile(member)) is not None
        }
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    wanted -= {name for name in wanted if name.startswith("examples/")}
    assert content.keys() ^ wanted <= {".helmignore"}
    made = {"Chart.yaml", "values.yaml", ".helmignore"}
    assert [name for name in wanted - made if content[name] != (source / name).read_bytes()] == []
    assert yaml.safe_load(content["Chart.yaml"]) == yaml.safe_load((source / "Chart.yaml").read_text())
    before, after = (source / "values.yaml").read_text().splitlines(), content["values.yaml"].decode().splitlines()
    changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
    images = [IMAGES["cpu"], IMAGES["router"]]
    assert changed == [(f"repository: {name}", f"repository: {REGISTRY}/{name}") for name in images]
    command = [helm, "template", "test", str(checkout.chart), "--set", "routers.replicas=1"]
    command += ["--set", "cluster.security.allow_plaintext=true", "--set", "redis.mode=valkey"]
    command += ["--set", "redis.valkey.auth.existingSecret=valkey"]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    version = yaml.safe_load(content["Chart.yaml"])["appVersion"]
    for name in images:
        assert f"image: {REGISTRY}/{name}:{version}\n" in rendered.replace('"', "")


def test_every_image_is_built_from_the_dockerfile_and_signed_by_its_digest(checkout: Checkout) -> None:
    checkout.release("images")
    asked, *builds = checkout.calls
    assert asked.split()[3] in DOCKERFILE
    targets = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    pushed = []
    for number, (build, (target, name)) in enumerate(zip(builds, IMAGES.items(), strict=True), start=2):
        assert f"--target {target} " in build
        assert target in targets
        given = dict(re.findall(r"--build-arg (\w+)=(\S+)", build))
        assert given.keys() <= arguments
        assert ("TORCH_PIP_ARGS" in given) == (target in ("cpu", "vllm"))
        assert (given["PYTHON_DIGEST"], given["SOURCE_DATE_EPOCH"]) == ("sha256:base", EPOCH)
        assert "--attest type=sbom --attest type=provenance,mode=max" in build
        assert f"name={REGISTRY}/{name}:{given['VERSION']},push=true" in build
        assert "rewrite-timestamp=true" in build
        pushed.append(f"{REGISTRY}/{name}@sha256:{number:064d}")
    assert (checkout.root / "dist" / "digests.txt").read_text().splitlines() == sorted(pushed)
    checkout.release("sign")
    assert checkout.calls[-len(IMAGES) :] == [f"sign --yes {name}" for name in sorted(pushed)]


def test_nothing_is_signed_that_was_not_pushed(checkout: Checkout) -> None:
    done = checkout.run("sign")
    assert done.returncode == 1
    assert "push first" in done.stderr
    docker = Path(checkout.environment["PATH"].split(":")[0]) / "docker"
    docker.write_text(
        '#!/bin/sh\n[ "$2" = imagetools ] || while [ "$1" != --metadata-file ]; do shift; done\necho {} >"$2"\n'
    )
    assert "expected the digest of what was pushed" in checkout.run("images").stderr


@pytest.mark.slow
def test_the_same_sources_give_the_same_wheel(tmp_path: Path) -> None:
    """From another folder, with other times of files, and beside what a build leaves behind."""
    with (ROOT / "pyproject.toml").open() as file:
        listed = re.search(r"^packages = (\[.*\])$", file.read(), re.MULTILINE)
    assert listed is not None
    found = []
    for number in range(2):
        source = tmp_path / f"source{number}"
        for package in json.loads(listed[1]):
            shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
            shutil.copy(ROOT / name, source)
        if number:
            (source / "tandem" / "native" / "kernels.so").touch()
            for path in source.rglob("*"):
                os.utime(path, (1, 1))
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(source / "dist"),
            ".",
        ]
        subprocess.run(command, cwd=source, env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH}, check=True)
        (wheel,) = (source / "dist").glob("*.whl")
        found.append(sha256(wheel))
    assert found[0] == found[1]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A real one: its address, and whose certificates to trust."""
    folder = tmp_path / "registry"
    certificates.create(folder, "test", [], days=1, authority_days=1)
    (port,) = free_ports("127.0.0.1")
    tls = {"certificate": str(folder / "edge.pem"), "key": str(folder / "edge.key")}
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    config = {"version": 0.1, "storage": storage, "http": {"addr": f"127.0.0.1:{port}", "tls": tls}}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log)
        try:
            yield f"localhost:{port}", folder / "ca.pem"
        finally:
            server.terminate()
            server.wait()


@pytest.mark.system
def test_users_pull_the_chart_that_was_pushed(checkout: Checkout, helm: str, registry: tuple[str, Path]) -> None:
    address, authority = registry
    trusting = {"REGISTRY": f"{address}/owner/tandem", "SSL_CERT_FILE": str(authority)}
    checkout.release("chart", **trusting)
    deadline = time.monotonic() + 60
    while (done := checkout.run("push-chart", **trusting)).returncode and time.monotonic() < deadline:
        assert "connection refused" in done.stderr + done.stdout
    digests = checkout.root / "dist" / "digests.txt"
    (pushed,) = digests.read_text().splitlines()
    checkout.release("push-chart", **trusting)
    assert digests.read_text().splitlines() == [pushed], "the same again"
    name, _, digest = pushed.partition("@")
    pulled = checkout.root / "pulled"
    command = [helm, "pull", f"oci://{name}@{digest}", "--destination", str(pulled)]
    pulled.mkdir()
    subprocess.run(command, env={**os.environ, **trusting}, check=True, capture_output=True)
    (file,) = pulled.iterdir()
    assert sha256(file) == sha256(checkout.chart)
