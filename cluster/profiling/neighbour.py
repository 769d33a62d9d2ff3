"""A noisy neighbour: an engine that computes while `tandem profile` measures another one, until its stdin closes.

python -m cluster.profiling.neighbour FOLDER SPEC prompts|decoding       SPEC: the EngineSpec as JSON
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from cluster.profiling.profiler import Grid, open_profiler
from tandem.config.engine import EngineSpec
from tandem.errors import UnavailableError

READY = "ready"
END_TIMEOUT_S = 60.0  # enough for the steps of a large model
STEPS, PROMPT = 32, 4  # decode steps after each one with prompts, and tokens of those

Load = Literal["prompts", "decoding"]


@contextmanager
def neighbours(count: int, folder: Path, engine: EngineSpec, load: Load) -> Iterator[None]:
    """Runs `count` neighbours inside the context. Raises UnavailableError."""
    command = [sys.executable, "-P", "-m", __name__, str(folder), engine.model_dump_json(), load]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for each in started:
            if each.stdout is None or READY not in (line.strip() for line in each.stdout):
                raise UnavailableError("a neighbour process did not start; its error output is above")
        yield
    finally:
        for each in started:
            if each.stdin is not None:
                each.stdin.close()
        for each in started:
            with each:
                try:
                    each.wait(timeout=END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    each.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.profiling.neighbour")
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine")
    parser.add_argument("load", choices=get_args(Load))
    options = parser.parse_args()
    engine = EngineSpec.model_validate_json(options.engine)
    ended = threading.Event()
    threading.Thread(target=_wait_stdin_closed, args=(ended,), daemon=True).start()
    with open_profiler(options.folder, engine, Grid()) as profiler:
        compute = profiler.prompts_s if options.load == "prompts" else partial(profiler.decoding_s, STEPS, PROMPT)
        compute()
        print(READY, flush=True)
        while not ended.is_set():
            compute()


def _wait_stdin_closed(ended: threading.Event) -> None:
    """Sets `ended` when stdin closes, which also happens if the parent is killed."""
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
