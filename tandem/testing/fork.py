"""A fork server for tests. Its processes start at once, because the imports are done: torch alone takes seconds.

    python -m tandem.testing.fork MODULE...

imports each MODULE, then reads one JSON object per line and answers each with its `number` and a result. `{"module",
"arguments", "log", "env", "folder"}` forks a process that runs `module` as a program; the result is its pid. `{"poll"}`
asks for the exit code of a pid, null while it runs. The server exits at the end of its input. Importing a MODULE must
start no thread.
"""

from __future__ import annotations

import contextlib
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
from itertools import count
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
        self._numbers = count(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.testing.fork", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            text=True,
        )

    def start(self, module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> ForkedProcess:
        request = {"module": module, "arguments": list(arguments), "log": str(log), "env": dict(env)}
        return ForkedProcess(self, module, self.call(request | {"folder": os.getcwd()}))

    def call(self, request: Mapping[str, Any]) -> Any:
        """Sends one request and returns the answer. Raises RuntimeError when the server is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            number = next(self._numbers)
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps({"number": number, **request}), file=self._process.stdin, flush=True)
            while line := self._process.stdout.readline():
                answered, answer = json.loads(line)
                if answered == number:  # otherwise of a call that a signal interrupted
                    return answer
        raise RuntimeError(f"the fork server of {self.modules[0]} is gone")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its input, waits, and closes its output
            pass


class ForkedProcess:
    """A child of the server. Only the server can wait for it."""

    def __init__(self, server: ForkServer, module: str, pid: int) -> None:
        self.pid = pid
        self._server, self._module = server, module
        self._lock = threading.RLock()  # while it is held, the server does not wait for the pid, so it is not reused
        self._returncode: int | None = None

    def poll(self) -> int | None:
        with self._lock:
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
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_child(module: str, arguments: Sequence[str], log: str, env: Mapping[str, str], folder: str) -> NoReturn:
    """Runs in the forked process and exits with `os._exit`, so none of the server's handlers or buffers run twice."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, number)
        os.close(nothing)
        os.close(output)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        gc.collect()  # a task that failed unseen says so, as at the end of an interpreter
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the tests end their processes, then this one
    for line in sys.stdin:
        request = json.loads(line)
        number = request.pop("number")
        if "poll" in request:
            answer = exit_code(request["poll"])
        elif not (answer := os.fork()):
            run_child(**request)
        print(json.dumps([number, answer]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
