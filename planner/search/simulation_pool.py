"""Runs simulations in parallel processes, and journals results so that an interrupted search resumes.

The children are forked, so they share the trace. Jobs and results pass as JSON over a pipe.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from planner.search.evaluate import Evaluation, Evaluator, Job
from tandem.config.model import Role
from tandem.errors import InternalError, TandemError
from tandem.version import tandem_version

Done = Callable[[Evaluation], None]


class Journal:
    """Results by job, one JSON line each. Lines of other traffic, hardware, objectives or code are skipped."""

    def __init__(self, path: Path | None, evaluator: Evaluator) -> None:
        self._path, self._about = path, fingerprint(evaluator)
        self._known: dict[str, Evaluation] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a line that an interruption cut short
                    self._read(json.loads(line))

    def _read(self, entry: dict[str, Any]) -> None:
        if entry["about"] == self._about:
            found = Evaluation.from_json(entry["evaluation"])
            self._known[_key(found.job)] = found

    def find(self, job: Job) -> Evaluation | None:
        return self._known.get(_key(job))

    def add(self, found: Evaluation) -> None:
        self._known[_key(found.job)] = found
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"about": self._about, "evaluation": found.to_json()}) + "\n")


@cache
def code_digest(root: Path = Path(__file__).parents[2]) -> str:
    """Of the version and the sources that a simulation may run: the planner, and what it shares with the product."""
    digest = hashlib.blake2b(tandem_version().encode(), digest_size=12)
    for package in ("kvtransfer", "planner", "router", "tandem"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(evaluator: Evaluator) -> str:
    """A digest of everything that affects a result, except the job."""
    trace, digest = evaluator.trace, hashlib.blake2b(digest_size=12)
    columns: list[NDArray[Any]] = [trace.arrival_s, trace.prompt_tokens, trace.output_tokens]
    columns += [] if trace.prefixes is None else [trace.prefixes.ids, trace.prefixes.ends]
    columns += [] if trace.label is None else [trace.label]
    for column in columns:
        digest.update(column.tobytes())
    hardware = evaluator.hardware.of(Role.DECODE)
    rest = (
        hardware.model, hardware.device, sorted(hardware.measured), hardware.acceptance, hardware.constrained,
        hardware.mask_s_per_row, hardware.corrections, trace.labels, evaluator.slo, evaluator.max_running_requests,
        evaluator.longest_step_s, evaluator.paper,
        None if trace.prefixes is None else trace.prefixes.block_tokens, code_digest(),
    )  # fmt: skip
    digest.update(repr((*rest, [hardware.cost(tp) for tp in hardware.measured])).encode())
    if evaluator.hardware.is_mixed:  # all else is the same for both roles
        digest.update(repr(evaluator.hardware.of(Role.PREFILL).device).encode())
    return digest.hexdigest()


def _key(job: Job) -> str:
    return json.dumps(job.to_json(), sort_keys=True)


class SimulationPool:
    """A context manager that owns the child processes. `processes` 1 simulates in this process."""

    def __init__(self, evaluator: Evaluator, processes: int, journal: Journal) -> None:
        self._evaluator, self._processes, self._journal = evaluator, processes, journal
        self._children: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> SimulationPool:
        fork = multiprocessing.get_context("fork")
        for _ in range(self._processes if self._processes > 1 else 0):
            ours, theirs = fork.Pipe()
            others = [connection for _, connection in self._children]
            child = fork.Process(target=_work, args=(self._evaluator, theirs, [ours, *others]), daemon=True)
            child.start()
            theirs.close()
            self._children.append((child, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child, connection in self._children:
            connection.close()
            if kind is not None:
                child.terminate()
            child.join()
        self._children = []

    def run(self, jobs: Sequence[Job], done: Done) -> list[Evaluation]:
        """Returns results in the order of the jobs. Raises the error of a failed simulation."""
        found: dict[int, Evaluation] = {}
        open_jobs: list[int] = []
        for number, job in enumerate(jobs):
            known = self._journal.find(job)
            if known is None:
                open_jobs.append(number)
            else:
                found[number] = known
                done(known)
        for number, result in self._results(jobs, open_jobs):
            self._journal.add(result)
            found[number] = result
            done(result)
        return [found[number] for number in range(len(jobs))]

    def _results(self, jobs: Sequence[Job], numbers: list[int]) -> Iterator[tuple[int, Evaluation]]:
        if not self._children:
            for number in numbers:
                yield number, self._evaluator.evaluate(jobs[number])
            return
        # Longest jobs first, so the last to finish is a short one.
        left = sorted(numbers, key=lambda number: jobs[number].layout.devices)
        running: dict[Connection, int] = {}
        idle = [connection for _, connection in self._children]
        while left or running:
            while left and idle:
                connection = idle.pop()
                running[connection] = left.pop()
                connection.send_bytes(_key(jobs[running[connection]]).encode())
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                yield running.pop(ready), _receive(ready)
                idle.append(ready)


def _receive(connection: Connection) -> Evaluation:
    try:
        answer = json.loads(connection.recv_bytes())
    except EOFError:
        raise InternalError("a simulation process died: run the command again with --state to resume") from None
    if "error" in answer:
        raise InternalError(f"a simulation failed: {answer['error']}")
    return Evaluation.from_json(answer)


def _work(evaluator: Evaluator, connection: Connection, inherited: list[Connection]) -> None:
    for other in inherited:
        other.close()  # else this child would never see the end of its pipe when the parent exits
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            job = Job.from_json(json.loads(connection.recv_bytes()))
            try:
                answer = evaluator.evaluate(job).to_json()
            except TandemError as error:
                answer = {"error": f"{job.layout}: {error.message}"}
            connection.send_bytes(json.dumps(answer).encode())
