"""The kubectl commands of the runbooks and the deploy page, held to what the rendered chart makes."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cluster.cli.main import app
from tests.unit.deploy.conftest import CHART, ROOT, Manifest

COMMANDS: Any = get_command(app)
PAGES = [*sorted((ROOT / "docs" / "runbooks").glob("*.md")), ROOT / "docs" / "deploy.md"]
RELEASE, NAMESPACE, CLUSTER = "demo", "tandem", "demo-tandem"
OPERATOR = ("kuberay", "deployment", "kuberay-operator")  # which the deploy page installs
SHORT = {"po": "pod", "deploy": "deployment", "svc": "service", "hpa": "horizontalpodautoscaler",
         "pvc": "persistentvolumeclaim", "cm": "configmap"}  # fmt: skip
READS_FILES = {"apply", "create", "kustomize"}
CLUSTER_WIDE = {"node", "crd"}
ELSEWHERE = {"event", "persistentvolumeclaim", "certificaterequest"}  # kinds that others make
INSIDE = re.compile(r'"?\$\(([^)]*)\)"?')
PLACEHOLDER = re.compile(r"[A-Z][A-Z-]*")
WITH_VALUE = {"-n", "-l", "-o", "-c", "--replicas", "--for", "--timeout", "--sort-by", "--field-selector"}
MONITORED = "podMonitor.enabled=true,serviceMonitor.enabled=true,prometheusRule.enabled=true"


@dataclass(frozen=True, slots=True)
class PodMade:
    labels: dict[str, str]
    containers: frozenset[str]
    ports: frozenset[int]

    def is_selected(self, selector: str) -> bool:
        return all(self._has(part) for part in re.split(r",(?![^(]*\))", selector))

    def _has(self, part: str) -> bool:
        if found := re.fullmatch(r"(\S+) in \((.*)\)", part):
            return self.labels.get(found[1]) in found[2].split(",")
        name, _, value = part.partition("=")
        return self.labels.get(name) == value


@dataclass
class Made:
    """What every example makes, with what KubeRay adds."""

    objects: set[tuple[str, str]] = field(default_factory=set)
    pods: list[PodMade] = field(default_factory=list)
    services: dict[str, list[PodMade]] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)

    def add(self, manifests: list[Manifest]) -> None:
        here = list(pods_of(manifests))
        self.pods += here
        for each in manifests:
            kind, name, spec = each["kind"].lower(), each["metadata"]["name"], each.get("spec", {})
            assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE, name
            self.objects.add((kind, name))
            if kind == "service":
                selector = ",".join(f"{label}={value}" for label, value in spec["selector"].items())
                self.services.setdefault(name, []).extend(pod for pod in here if pod.is_selected(selector))
            if kind == "raycluster":
                self.services.setdefault(f"{name}-head-svc", []).extend(
                    pod for pod in here if pod.is_selected("ray.io/node-type=head")
                )
        self.secrets |= set(re.findall(r"[sS]ecretName'?: '?([\w-]+)", str(manifests)))


def pods_of(manifests: list[Manifest]) -> Iterator[PodMade]:
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] in ("Deployment", "Job"):
            yield pod_of(spec["template"], {})
        elif each["kind"] == "RayCluster":
            of_cluster = {"ray.io/cluster": each["metadata"]["name"]}
            yield pod_of(spec["headGroupSpec"]["template"], of_cluster | {"ray.io/node-type": "head"})
            for group in spec.get("workerGroupSpecs", []):
                labels = of_cluster | {"ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
                yield pod_of(group["template"], labels, "wait-gcs-ready")


def pod_of(template: Manifest, more_labels: dict[str, str], *more_containers: str) -> PodMade:
    spec = template["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    ports = {port["containerPort"] for each in containers for port in each.get("ports", [])}
    names = {each["name"] for each in containers} | set(more_containers)
    return PodMade(template["metadata"]["labels"] | more_labels, frozenset(names), frozenset(ports))


@pytest.fixture(scope="module")
def made(helm: str) -> Made:
    found = Made()
    for example in sorted((CHART / "examples").glob("*.yaml")):
        command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(example)]
        command += [part for each in MONITORED.split(",") for part in ("--set", f"monitoring.{each}")]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.add([each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each])
    return found


def commands_in(text: str, program: str) -> Iterator[list[str]]:
    """Of blocks of commands and of shell sessions, also those whose output is part of another."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    commands = "\n".join(block for language, block in blocks if language in ("", "bash"))
    for line in commands.replace("\\\n", " ").splitlines():
        if not re.search(rf"(^|[$|(] ?){program} ", line):
            continue
        outputs = [found[1] for found in INSIDE.finditer(line)]
        words = shlex.split(INSIDE.sub("POD", line), comments=True)
        for part in (words, *(shlex.split(output) for output in outputs)):
            pipes = [-1, *(at for at, word in enumerate(part) if word == "|"), len(part)]
            for begin, end in itertools.pairwise(pipes):
                command = part[begin + 1 : end]
                if command[:1] == ["$"]:
                    command = command[1:]
                if command[:1] == [program]:
                    yield command[1:]


def of_page(page: Path, program: str) -> list[list[str]]:
    return list(commands_in(page.read_text(), program))


@dataclass
class Asked:
    """One kubectl command, taken apart."""

    verb: str
    names: list[str]
    flags: dict[str, str]
    inside: list[str]  # after --

    @classmethod
    def of(cls, words: list[str]) -> Asked:
        inside = words[words.index("--") + 1 :] if "--" in words else []
        rest = iter(words[: words.index("--")] if "--" in words else words)
        flags, plain = dict[str, str](), list[str]()
        for word in rest:
            name, equals, value = word.partition("=")
            if word.startswith("-"):
                flags[name] = value if equals else next(rest) if name in WITH_VALUE else ""
            else:
                plain.append(word)
        return cls(plain[0], plain[1:], flags, inside)

    def targets(self) -> Iterator[tuple[str, str]]:
        """(kind, name); the name is empty for all of a kind."""
        names = self.names[1:] if self.verb in ("rollout", "top", "scale") and "/" not in self.names[0] else self.names
        if self.verb in ("logs", "exec"):
            names = [name if "/" in name else f"pod/{name}" for name in self.names[:1]]
        if self.verb in ("cordon", "drain"):
            names = [f"node/{name}" for name in self.names]
        if self.verb == "port-forward":
            names = self.names[:1]
        if self.verb == "top":
            names = self.names
        if names and "/" not in names[0]:
            kinds, *named = names
            names = [f"{kind}/{name}" for kind in kinds.split(",") for name in named or [""]]
        for each in names:
            kind, _, name = each.partition("/")
            kind = SHORT.get(kind, kind if kind in SHORT.values() else kind.removesuffix("s"))
            yield kind, name


def faults(asked: Asked, made: Made) -> Iterator[str]:
    namespace = asked.flags.get("-n")
    targets = list(asked.targets())
    if asked.verb in READS_FILES:
        return
    for kind, name in targets:
        if namespace not in (None, NAMESPACE):
            yield from [] if (namespace, kind, name) == OPERATOR else [f"{namespace}: {kind} {name}"]
            return
        if kind in CLUSTER_WIDE:
            continue
        if namespace is None:
            yield f"no namespace for {kind}"
        yield from unmade(kind, name, made)
    chosen = [pod for pod in made.pods if pod.is_selected(asked.flags["-l"])] if "-l" in asked.flags else made.pods
    if "-l" in asked.flags and not chosen:
        yield f"no pod is selected by {asked.flags['-l']}"
    for kind, name in targets:
        if kind == "service" and asked.verb in ("exec", "logs", "port-forward"):
            chosen = made.services.get(name, [])
    container = asked.flags.get("-c")
    if container is not None and not any(container in pod.containers for pod in chosen):
        yield f"no container {container}"
    if asked.verb == "port-forward":
        port = asked.names[1].rpartition(":")[2]
        if not any(int(port) in pod.ports for pod in chosen):
            yield f"no port {port}"
    if asked.inside[:1] == ["tandem"]:
        command = COMMANDS.commands[asked.inside[1]]
        command.make_context(asked.inside[1], list(asked.inside[2:])).close()


def unmade(kind: str, name: str, made: Made) -> Iterator[str]:
    if kind == "service" and name in made.services:
        return
    if name and not PLACEHOLDER.fullmatch(name):
        known = {("secret", secret) for secret in made.secrets} | made.objects
        if (kind, name) not in known:
            yield f"no {kind} {name}"
    elif kind != "pod" and kind not in ELSEWHERE and kind not in {known for known, _ in made.objects}:
        yield f"nothing makes a {kind}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_kubectl_command_is_about_what_the_chart_makes(page: Path, made: Made) -> None:
    found = {shlex.join(words): list(faults(Asked.of(words), made)) for words in of_page(page, "kubectl")}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


def test_every_runbook_has_steps_with_kubectl() -> None:
    pages = [page for page in PAGES if page.stem.startswith("Tandem")]
    assert [page.stem for page in pages if not of_page(page, "kubectl")] == []
    assert sum(len(of_page(page, "kubectl")) for page in pages) > 100


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("kubectl -n tandem logs deployment/demo-tandem-routers", "no deployment demo-tandem-routers"),
        ("kubectl -n tandem logs -l app.kubernetes.io/component=worker", "no pod is selected"),
        ("kubectl -n tandem logs POD -c ray-worker", "no container ray-worker"),
        ("kubectl -n tandem exec svc/demo-tandem-head-svc -c ray-node -- ray status", "no container ray-node"),
        ("kubectl -n tandem port-forward svc/demo-tandem-http 9000", "no port 9000"),
        ("kubectl get pods", "no namespace"),
        ("kubectl -n tandem get statefulset", "nothing makes a statefulset"),
        ("kubectl -n ray logs deployment/kuberay-operator", "ray: deployment kuberay-operator"),
    ],
)
def test_a_command_about_something_else_would_be_found(command: str, named: str, made: Made) -> None:
    (words,) = commands_in(f"```bash\n{command}\n```", "kubectl")
    assert any(named in fault for fault in faults(Asked.of(words), made))


@pytest.mark.slow
def test_kubectl_itself_takes_every_command() -> None:
    """As far as it can say without a cluster: verbs, flags and their values."""
    fetched = subprocess.run(
        [ROOT / "scripts" / "fetch-helm.sh", "kubectl"], check=True, capture_output=True, text=True
    )
    every = {shlex.join(words): words for page in PAGES for words in of_page(page, "kubectl")}
    asks = {command: words for command, words in every.items() if Asked.of(words).verb not in READS_FILES}
    wrong = {}
    for command, words in asks.items():
        given = [fetched.stdout.strip(), "--server=http://127.0.0.1:1", *words]
        done = subprocess.run(given, capture_output=True, text=True, check=False, env={"HOME": "/nonexistent"})
        if "refused" not in done.stderr:
            wrong[command] = done.stderr
    assert wrong == {}
    assert len(asks) > 40


def rendered(helm: str, words: list[str], *base: Path) -> subprocess.CompletedProcess[str]:
    """What `helm install` and `helm upgrade` would make. `base`: a values file beside those of the command."""
    given = [part for path in base for part in ("--values", str(path))]
    for flag, value in itertools.pairwise(words):
        if flag in ("--values", "--set"):
            given += [flag, value]
    command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_chart_takes_the_values_of_every_helm_command(page: Path, helm: str) -> None:
    """Those that change a release: beside some example's."""
    for words in of_page(page, "helm"):
        files = [value for flag, value in itertools.pairwise(words) if flag == "--values"]
        if "helm/tandem" not in words or "mine.yaml" in files:
            continue
        bases: list[tuple[Path, ...]] = [(each,) for each in sorted((CHART / "examples").glob("*.yaml"))]
        done = [rendered(helm, words, *base) for base in ([()] if files else bases)]
        assert any(each.returncode == 0 for each in done), shlex.join(words) + done[0].stderr


@pytest.mark.parametrize("way", ["On kind", "On one GPU", "On several machines"])
def test_each_way_of_the_deploy_page_leads_from_an_empty_cluster_to_a_completion(way: str, helm: str) -> None:
    """Operator, images, release, completion, in this order; each image that the release needs was built before."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    section = page.partition(f"### {way}\n")[2].partition("\n### ")[0]
    helms = list(commands_in(section, "helm"))
    installed = [words[1] for words in helms if words[0] == "install"]
    assert (installed[0], installed[-1]) == ("kuberay-operator", RELEASE)
    assert helms[-1] == ["-n", NAMESPACE, "test", RELEASE, "--logs"]
    built = [dict(itertools.pairwise(words)) for words in commands_in(section, "docker") if words[0] == "build"]
    stages = set(re.findall(r" AS (\w+)$", (ROOT / "deploy" / "docker" / "Dockerfile").read_text(), re.MULTILINE))
    assert {each["--target"] for each in built} <= stages
    done = rendered(helm, next(words for words in helms if words[:2] == ["install", RELEASE]))
    assert done.returncode == 0, done.stderr
    manifests = [each for each in yaml.safe_load_all(done.stdout) if each]
    images = set(re.findall(r"'image': '([^']*tandem[^']*)'", str(manifests)))
    assert images == {each["-t"] for each in built}
    (config,) = [each["data"] for each in manifests if each["kind"] == "ConfigMap"]
    (model,) = yaml.safe_load(config["cluster.yaml"])["models"]
    assert f"[Ask it](#ask-it) the model `{model.get('name', model['source'])}`" in section


def test_what_the_deploy_page_asks_is_a_request() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    section = page.partition("### Ask it\n")[2].partition("\n## ")[0]
    forwarded = next(words[-1] for words in commands_in(section, "kubectl") if "port-forward" in words)
    asked = list(commands_in(section, "curl"))
    urls = [word for words in asked for word in words if word.startswith("http")]
    assert [url.partition(forwarded)[2] for url in urls] == ["/v1/models", "/v1/chat/completions"]
    body = json.loads(dict(itertools.pairwise(asked[-1]))["-d"])
    assert {"model", "messages", "max_tokens"} == body.keys()
