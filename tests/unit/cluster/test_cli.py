"""The command answers at once, and its errors are one line."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cluster.certificates import create
from cluster.cli.main import app, main
from cluster.cli.state_file import of_this_process, written
from tandem.testing.models import write_tiny_llama

COMMAND = get_command(app)
HEAVY = ("torch", "ray", "grpc", "pydantic", "transformers")
ELSEWHERE = ("--address", "127.0.0.1:1")


@dataclass(frozen=True)
class Done:
    returncode: str | int | None
    stdout: str
    stderr: str


Tandem = Callable[..., Done]


@pytest.fixture
def tandem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tandem:
    """`tandem("status", "--json")`, in this process: to import what a command needs takes seconds."""
    for name, value in (
        ("XDG_STATE_HOME", str(tmp_path)),
        ("GRPC_ENABLE_FORK_SUPPORT", "false"),
        ("GRPC_VERBOSITY", "ERROR"),
    ):
        monkeypatch.setenv(name, value)  # the command sets those of gRPC where they are not

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return Done(ended.value.code, said.out, said.err)

    return run


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, json, cluster.cli.main; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []


def test_help_lists_the_commands_and_an_error_is_one_line_of_a_process_too(tmp_path: Path) -> None:
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "cluster"]
    done = subprocess.run([*command, "status"], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    done = subprocess.run([*command, "--help"], env=env, capture_output=True, text=True, check=True, timeout=60)
    for name in ("up", "demo", "chat", "status", "trace", "pull", "doctor"):
        assert name in done.stdout


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def help_of(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        COMMAND([*path, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("path", [*commands(COMMAND)], ids=" ".join)
def test_every_command_helps(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A bracket in a help text may be markup, and then ends in a traceback."""
    assert "Usage:" in help_of(path, capsys)


def test_no_option_is_cut_off_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path in commands(COMMAND):
        shown = help_of(path, capsys)
        context: Any = COMMAND
        for name in path:
            context = context.commands[name]
        names = [name for each in context.params for name in (*each.opts, *each.secondary_opts) if name[0] == "-"]
        assert [name for name in names if not re.search(rf"{name}\b", shown)] == [], path
        assert [line for line in shown.splitlines() if line.startswith("  ") and line.endswith("...")] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("status",), "tandem up"),
        (("status", "--name", "nope"), "tandem up"),
        (("up", "--cluster", "No Name"), "name: "),
        (("trace",), "tandem up"),
        (("trace", "abc", "--address", "127.0.0.1:1"), "--address"),
        (("chat", "hi"), "tandem up"),
        (("status", "--address", "127.0.0.1:1"), "--address"),
        (("status", *ELSEWHERE, "--cluster", "c"), "--cluster: expected none with --address"),
        (("down", *ELSEWHERE, "--cluster", "c"), "--cluster: expected none with --address"),
        (("chat", "hi", *ELSEWHERE, "--cluster", "c"), "--cluster: expected none with --address"),
        (("chat", "hi", *ELSEWHERE, "--api-key", "secret\n"), "TANDEM_API_KEY: expected printable ASCII"),
        (("chat", "hi", *ELSEWHERE, "--api-key", "schlüssel"), "TANDEM_API_KEY: expected printable ASCII"),
        (("restart", "--watch", "--model", "m", *ELSEWHERE), "--model: expected none with --watch"),
        (("restart", "--watch", "--wait", *ELSEWHERE), "--wait: expected none with --watch"),
        (("restart", "--watch", "--routers", *ELSEWHERE), "--routers: expected none with --watch"),
        (("top", "--once", "--interval", "1"), "--interval: expected none with --once"),
        (("trace", "abc", "--limit", "20"), "--limit: expected none with the id of a request"),
        (("audit", "verify", "/nowhere/audit.jsonl"), "FILE: cannot read /nowhere/audit.jsonl: No such file"),
        (("up", "--http-port", "70000"), "router.http_port"),
        (("up", "--decode", "0"), "decode.workers"),
        (("up", "--backend", "nomad"), "control.backend"),
        (("up", "--model", "nobody/knows-it", "--http-port", "0", "--grpc-port", "0", "--admin-port", "0"), "pull"),
    ],
)
def test_errors_are_one_line_on_stderr(tandem: Tandem, arguments: tuple[str, ...], says: str) -> None:
    done = tandem(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_cannot_be_used_is_named_in_one_line(tandem: Tandem, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tandem" / "mine.json").mkdir(parents=True)
    for arguments, said in (
        (("certs", "init", str(tmp_path / "file" / "certs")), f"{tmp_path}/file/certs: Not a directory"),
        (("status", "--cluster", "mine"), f"{tmp_path}/tandem/mine.json: Is a directory"),
        (("up", "--detach", "--name", "mine"), f"{tmp_path}/tandem/mine.json: Is a directory"),
    ):
        done = tandem(*arguments)
        assert (done.returncode, done.stderr) == (2, f"error: {said}\n")


def test_a_broken_audit_log_is_an_exit_code_of_its_own(tandem: Tandem, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"time":"now"}\n')
    done = tandem("audit", "verify", str(path))
    assert done.returncode == 1
    assert done.stdout.startswith(f"broken: {path}: line 1: expected a whole line")
    path.write_text("")
    assert tandem("audit", "verify", str(path)).returncode == 0


def test_what_grpc_notes_of_strangers_stays_off_the_terminal(tmp_path: Path) -> None:
    create(tmp_path / "certs", "t", [], 1, 1)
    code = f"""
import pathlib, socket, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from cluster.cli.main import main
sys.argv = ["tandem", "version"]
with suppress(SystemExit):
    main()
import grpc
folder = pathlib.Path({str(tmp_path / "certs")!r})
pair = (folder / "edge.key").read_bytes(), (folder / "edge.pem").read_bytes()
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
server.start()
with socket.create_connection(("127.0.0.1", port)) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while stranger.recv(64):
        pass
server.stop(None).wait()
"""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""


@pytest.mark.acceptance(32, here="ports, model, memory; no interface")
def test_doctor_names_the_fix_of_what_is_wrong(tandem: Tandem, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as held:
        config = tmp_path / "cluster.yaml"
        port = held.getsockname()[1]
        config.write_text(f"models: [{{source: {model}}}]\nrouter: {{http_port: {port}}}\n")
        done = tandem("doctor", "--config", str(config))
    assert done.returncode == 1
    assert f"{port} is in use" in done.stdout
    assert "`tandem up --http-port` or router.http_port in the configuration" in done.stdout
    assert "✓ shared memory" in done.stdout
    assert re.search(r"✓ memory: about \d+ MiB needed .*, \d+ MiB available", done.stdout)


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.slow
def test_doctor_knows_the_ports_and_the_memory_of_the_cluster_that_runs_here(
    tandem: Tandem, tmp_path: Path, starting: bool
) -> None:
    with ExitStack() as held:
        listening = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        admin, http, grpc = ports = [each.getsockname()[1] for each in listening]
        config = tmp_path / "cluster.yaml"
        config.write_text(
            f"name: mine\nmodels: [{{source: {write_tiny_llama(tmp_path / 'tiny')}}}]\n"
            f"router: {{http_port: {http}, grpc_port: {grpc}}}\ncontrol: {{admin_port: {admin}}}\n"
        )
        addresses = ("", "", "") if starting else (f"127.0.0.1:{port}" for port in ports)
        admin_at, http_at, grpc_at = addresses
        running = replace(of_this_process("mine"), admin=admin_at, http=http_at, grpc=grpc_at)
        with written(running):
            done = tandem("doctor", "--config", str(config))
        alone = tandem("doctor", "--config", str(config))
    assert done.returncode == 0, done.stdout
    assert (
        f"✓ ports: {http}, {grpc} and {admin} are in use by the running cluster mine (pid {os.getpid()})" in done.stdout
    )
    assert "– memory: not checked: the running cluster mine uses it" in done.stdout
    assert f"{http} is in use" in alone.stdout


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
@pytest.mark.slow
def test_doctor_names_a_damaged_file_of_the_checkpoint(tandem: Tandem, tmp_path: Path, name: str) -> None:
    model = write_tiny_llama(tmp_path / "model")
    damaged = model / name
    damaged.write_bytes(damaged.read_bytes()[:-100])
    done = tandem("doctor", "--model", str(model))
    assert done.returncode == 1
    (said,) = [line for line in done.stdout.splitlines() if "model:" in line]
    assert said.startswith("✗")
    assert str(damaged) in said


@pytest.mark.slow
def test_doctor_reports_a_missing_model_once(tandem: Tandem, tmp_path: Path) -> None:
    done = tandem("doctor", "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stdout.count("nowhere") == 1
    assert "– memory: not checked" in done.stdout


@pytest.mark.slow
def test_a_width_that_does_not_fit_is_named_as_the_configuration_names_it(tandem: Tandem, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"models: [{{source: {write_tiny_llama(tmp_path / 'tiny')}, prefill: {{tp: 3}}}}]\n")
    done = tandem("doctor", "--config", str(config))
    assert "prefill.tp: expected one of 1" in done.stdout
    assert "tp: tp:" not in done.stdout
