"""A fork server for tests. Its processes start at once, because the imports are done: torch alone takes seconds.

    python -m tandem.testing.fork MODULE...

imports each MODULE, then reads one JSON object per line and answers each with one line. `{"module", "arguments", "log",
"env"}` forks a process that runs `module` as a program and returns its pid. `{"poll"}` returns the exit code of a pid,
null while it runs. The server exits at the end of its input. Importing a MODULE must start no thread.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

POLL_S = 0.01


class Process(Protocol):
    """The common part of `subprocess.Popen` and `ForkedProcess`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkServer:
    """Starts programs that import `modules`, any number of times.

    `env` adds to the environment of the server itself, where the C library looks: programs cannot change it.
    """

    def __init__(self, *modules: str, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self.modules = modules
        self._lock = threading.Lock()  # tests stop workers in threads
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.testing.fork", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            text=True,
        )

    def start(self, module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> ForkedProcess:
        request = {"module": module, "arguments": list(arguments), "log": str(log), "env": dict(env)}
        return ForkedProcess(self, module, self.call(request))

    def call(self, request: Mapping[str, Any]) -> Any:
        """Sends one request and returns the answer. Raises RuntimeError when the server is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server of {self.modules[0]} is gone")
        return json.loads(line)

    def close(self) -> None:
        with self._process:  # closes its input, waits, and closes its output
            pass


class ForkedProcess:
    """A child of the server. Only the server can wait for it."""

    def __init__(self, server: ForkServer, module: str, pid: int) -> None:
        self.pid = pid
        self._server, self._module = server, module
        self._returncode: int | None = None

    def poll(self) -> int | None:
        if self._returncode is None:
            self._returncode = self._server.call({"poll": self.pid})
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:  # until the server has waited for it, the pid is not reused
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_child(module: str, arguments: Sequence[str], log: str, env: Mapping[str, str]) -> NoReturn:
    """Runs in the forked process and exits with `os._exit`, so none of the server's handlers or buffers run twice."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # prints the traceback as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # keeps the shared pages shared: the collector does not write to them
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = exit_code(request["poll"])
        elif not (answer := os.fork()):
            run_child(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
