"""`tandem trace record`: writes the requests of a running cluster to a trace that simulate, plan and bench read."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from cluster.cli.admin_client import Admin, controller_at
from cluster.interruptible import run_interruptible
from planner.traces.jsonl import log_row
from tandem.errors import ConfigError
from tandem.v1 import trace_pb2


@dataclass(slots=True)
class Recorded:
    requests: int = 0
    unanswered: int = 0  # refused, or ended before the first token: a trace needs an output length
    lost: int = 0


def run_record(
    target: Admin, output: Path, *, model: str, duration_s: float | None, requests: int, overwrite: bool
) -> int:
    """Records until Ctrl-C, `duration_s` or `requests`. Returns 1 if nothing was recorded, and then leaves an existing
    file as it was, and no new one.

    Raises ConfigError, and the controller's error.
    """
    is_new, is_replaced = not output.exists(), overwrite and output.is_file()
    try:
        file = output.open("a" if is_replaced else "w" if overwrite else "x", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{output}: the file exists: choose another name, or pass --overwrite", field="output"
        ) from None
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}", field="output") from None
    with file:
        try:
            return run_interruptible(_record(target, file, model, duration_s, requests))
        finally:
            if is_new and not file.tell():
                output.unlink(missing_ok=True)


async def _record(target: Admin, file: TextIO, model: str, duration_s: float | None, requests: int) -> int:
    console, seen = Console(stderr=True, highlight=False), Recorded()
    shown = console.status("recording") if sys.stderr.isatty() else None
    if shown is not None:
        shown.start()
    try:
        async with asyncio.timeout(duration_s), controller_at(target) as stub:
            async for each in stub.RecordRequests(trace_pb2.RecordRequestsRequest(model=model)):
                note(each, seen, file)
                if shown is not None:
                    shown.update(f"recording: {seen.requests} requests; Ctrl-C to stop")
                if seen.requests >= requests:
                    break
    except (TimeoutError, asyncio.CancelledError):
        pass  # the requested end of the recording
    finally:
        if shown is not None:
            shown.stop()
    console.print(f"{file.name}: {seen.requests} requests")
    if seen.unanswered:
        console.print(f"left out: {seen.unanswered} that ended without output (the real load was higher)")
    if seen.lost:
        console.print(f"missing: {seen.lost} that arrived faster than they could be recorded")
    return 0 if seen.requests else 1


def note(logged: trace_pb2.LoggedRequest, seen: Recorded, file: TextIO) -> None:
    """Writes one line of a request log. The first one replaces what the file had."""
    seen.lost += logged.lost
    if not logged.output_tokens:
        seen.unanswered += 1
        return
    row = log_row(
        logged.received_unix_s,
        logged.prompt_tokens,
        logged.output_tokens,
        blocks=(logged.block_tokens, logged.block_hashes),
        times_s={name: getattr(logged, name) for name in ("ttft_s", "decode_s") if logged.HasField(name)},
        label=(logged.priority, logged.tenant),
    )
    if not seen.requests and file.mode == "a":
        file.truncate(0)
    file.write(row)
    file.flush()
    seen.requests += 1
