"""The Dockerfile without an engine that builds it: linted, and the steps of the router's image run in a folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.testing.models import write_tiny_llama

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
VLLM = ROOT / "scripts" / "vllm-requirements.txt"
MIB = 1 << 20
NOBODY = 10001
STEPS_S = 300


@dataclass
class Stage:
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # (instruction, value)


def stages() -> dict[str, Stage]:
    """By name, in order."""
    with DOCKERFILE.open("rb") as file:
        parsed = DockerfileParser(fileobj=file).structure
    found: dict[str, Stage] = {}
    for each in parsed:
        if each["instruction"] == "FROM":
            parent, _, name = each["value"].split()
            stage = found[name] = Stage(parent)
        elif found:
            stage.steps.append((each["instruction"], each["value"]))
    return found


def lineage(name: str) -> list[tuple[str, str]]:
    """The steps of a stage after those that it stands on."""
    known = stages()
    stage = known[name]
    return (lineage(stage.parent) if stage.parent in known else []) + stage.steps


def locked_by(image: str) -> dict[str, str]:
    """Versions by name."""
    locked: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", (DOCKERFILE.parent / f"{image}.lock").read_text()):
        assert "--hash=sha256:" in entry, entry[:60]
        requirement = Requirement(entry.split("\\\n")[0])
        locked[canonicalize_name(requirement.name)] = next(iter(requirement.specifier)).version
    return locked


def requirements(file: Path) -> list[Requirement]:
    return [Requirement(line) for line in file.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("image", ["node", "router", "vllm"])
def test_all_that_an_image_installs_beside_torch_is_locked_by_version_and_hash(image: str) -> None:
    """Also a requirement that was added or raised since: then `make lock`."""
    locked = locked_by(image)
    assert "torch" not in locked
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = [Requirement(each) for each in tomllib.load(file)["project"]["dependencies"]]
    if image == "router":
        declared = requirements(DOCKERFILE.parent / "router-requirements.txt")
    if image == "vllm":
        assert locked.keys() == {canonicalize_name(each.name) for each in requirements(VLLM)}
        declared += requirements(VLLM)
        locked = locked_by("node") | locked  # over which it is installed
    for each in declared:
        assert each.name == "torch" or each.specifier.contains(locked[canonicalize_name(each.name)]), each
    assert f"--require-hashes --no-deps --requirement /src/{image}.lock" in DOCKERFILE.read_text()


def test_hadolint_has_nothing_to_say() -> None:
    linted = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize("target", ["router", "cpu", "cuda", "vllm"])
def test_every_target_runs_as_nobody_special_and_says_whether_it_is_healthy(target: str) -> None:
    steps = lineage(target)
    names = [name for name, _ in steps]
    assert [value for name, value in steps if name == "USER"][-1] == f"{NOBODY}:{NOBODY}"
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "HEALTHCHECK" in names
    titles = " ".join(value for name, value in steps if name == "LABEL")
    assert all(f"org.opencontainers.image.{key}" in titles for key in ("title", "licenses", "version", "revision"))


@pytest.mark.parametrize(("target", "extras"), [("cpu", ""), ("cuda", "cuda"), ("vllm", "")])
def test_the_images_of_gpus_and_of_vllm_contain_what_those_need(target: str, extras: str) -> None:
    """Extras that pyproject.toml has, in the environment that the target copies."""
    copied = [value for name, value in lineage(target) if name == "COPY" and "/opt/tandem " in value]
    assert len(copied) == 1, "each copy of an environment is another layer of gigabytes"
    stage = copied[0].split()[0].removeprefix("--from=")
    *_, default = [value for name, value in lineage(stage) if name == "ARG" and value.startswith("EXTRAS=")]
    assert default.removeprefix("EXTRAS=").strip('"') == extras
    assert any("vllm.lock" in value for _, value in lineage(stage)) == (target == "vllm")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(filter(None, extras.split(","))) <= known.keys()


def test_base_images_can_be_pinned_by_their_digest() -> None:
    assert stages()["python"].parent == "${PYTHON_IMAGE}${PYTHON_DIGEST:+@$PYTHON_DIGEST}"


class Folder:
    """Where the steps of some stages run: the paths below / that they name are below this folder."""

    PATHS = ("/opt", "/wheels", "/src", "/root/.cache")
    EPOCH = "1700000000"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"PATH": os.environ["PATH"], "HOME": str(root), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.env |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        self.at = root

    def below(self, text: str) -> str:
        words = text.split(" ")
        for path in self.PATHS:
            words = [f"{self.root}{word}" if word.startswith(path) else word for word in words]
        return " ".join(words)

    def run(self, name: str) -> None:
        for instruction, value in stages()[name].steps:
            match instruction:
                case "ARG":
                    key, _, default = value.partition("=")
                    self.env[key] = self.EPOCH if key == "SOURCE_DATE_EPOCH" else default.strip('"')
                case "WORKDIR":
                    self.at = Path(self.below(value))
                    self.at.mkdir(parents=True)
                case "COPY" if not value.startswith("--from"):
                    self._copy(*value.split(" "))
                case "RUN":
                    words = [word for word in value.split(" ") if not word.startswith("--mount")]
                    self._shell(self.below(" ".join(words)))

    def _copy(self, *words: str) -> None:
        target = self.at / self.below(words[-1])
        for source in words[:-1]:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            ["sh", "-euc", command],
            cwd=self.at,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=STEPS_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def read_only() -> list[str]:
    """Before a command: it finds the root file system read-only. Nothing, where one may not do that here."""
    remount = ["unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro / && exec "$@"', "-"]
    return remount if subprocess.run([*remount, "true"], check=False, capture_output=True).returncode == 0 else []


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the router's image has in /opt, made by the Dockerfile's own steps."""
    return build_router(tmp_path_factory.mktemp("image"))


def build_router(root: Path) -> Path:
    folder = Folder(root)
    for name in ("python", "wheel", "sbom", "router-environment"):
        folder.run(name)
    return root / "opt" / "tandem"


@pytest.mark.system
def test_the_routers_image_is_small_and_lists_what_is_in_it(image: Path) -> None:
    parts = json.loads((image / "sbom.cdx.json").read_text())["components"]
    names = {part["name"].lower() for part in parts}
    assert {"tandem-serve", "grpcio", "tokenizers"} <= names
    assert names & {"torch", "ray", "transformers"} == set()
    size = sum(path.stat().st_size for path in image.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"router image: {len(parts)} packages, {size / MIB:.0f} MiB above Python's own")
    assert size < 250 * MIB


def contents(folder: Path) -> dict[str, str]:
    """What a layer has of it, but times, which the release sets."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    return found


@pytest.mark.system
def test_the_same_commit_gives_the_same_files_in_the_routers_image(image: Path) -> None:
    """Made again at the same path, which scripts of an environment have in their first line."""
    first, root = contents(image), image.parents[1]
    aside = root.with_name("first")
    root.rename(aside)
    try:
        root.mkdir()
        second = contents(build_router(root))
        shutil.rmtree(root)
    finally:
        aside.rename(root)
    assert len(first) > 1000
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} == set()


@pytest.mark.system
async def test_the_routers_image_serves_where_nothing_can_be_written(image: Path, tmp_path: Path) -> None:
    controller, worker = StubController(), StubWorker("d0", Role.DECODE, "tiny")
    await controller.start()
    await worker.start()
    await controller.set_workers(worker)
    model = image.parent / "model"
    write_tiny_llama(model)
    served = ServedModel(name="tiny", model_dir=str(model), model_fingerprint="f", block_tokens=16)
    launch = RouterLaunch(
        cluster="test",
        router_id="router-0",
        router=RouterSpec(http_port=0, grpc_port=0),
        models=(served,),
        controller_address=controller.address,
        redis_url=None,
    )
    (image.parent / "router.json").write_text(launch.model_dump_json())
    log = tmp_path / "router.log"
    command = [f"{image}/bin/python", "-m", "router", "--launch", f"{image.parent}/router.json"]
    with log.open("wb") as output:
        router = await asyncio.create_subprocess_exec(*read_only(), *command, cwd="/", env={}, stderr=output)
    try:
        await until(lambda: router.returncode is not None or "router ready" in log.read_text(), 30)
        port = log.read_text().split("http=127.0.0.1:")[1].split()[0]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
            assert answer.status_code == 200, answer.text
        for path, code in (("/health", 0), ("/nothing-here", 1)):
            check = await asyncio.create_subprocess_exec(
                image / "bin" / "python", ROOT / "deploy" / "docker" / "healthcheck.py",
                env={"TANDEM_HEALTH_URL": f"{url}{path}"}, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            assert await check.wait() == code
    finally:
        router.terminate()
        await router.wait()
        await worker.kill()
        await controller.stop()
    assert router.returncode == 0
