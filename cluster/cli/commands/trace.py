"""`tandem trace`: shows the stages of one request as a Gantt chart, or lists the latest requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from cluster.cli.admin_client import TIMEOUT_S, Admin, controller_at, find_admin
from cluster.cli.console import console
from cluster.cli.request_trace import fetch, show
from tandem.errors import ConfigError
from tandem.v1 import trace_pb2

LISTED = 20


def run_trace(
    request_id: str | None,
    as_json: bool,
    limit: int | None,
    address: str | None,
    cluster: str | None,
    tls: Path | None = None,
) -> int:
    """Raises ConfigError, or NotFound if no router has the request."""
    if request_id is not None and limit is not None:
        raise ConfigError(f"--limit: expected none with the id of a request, got {limit}", field="--limit")
    target = find_admin(address, cluster, tls)
    screen = console()
    if request_id is None:
        found = asyncio.run(fetch_latest(target, limit or LISTED))
        if as_json:
            print(json.dumps([to_json(trace) for trace in found], indent=2))
        else:
            show_list(found, screen)
        return 0
    trace = asyncio.run(fetch(target, request_id))
    if as_json:
        print(json.dumps(to_json(trace), indent=2))
    else:
        show(trace, screen)
    return 0


async def fetch_latest(admin: Admin, limit: int) -> list[trace_pb2.RequestTrace]:
    async with controller_at(admin) as stub:
        answer = await stub.ListTraces(trace_pb2.ListTracesRequest(limit=limit), timeout=TIMEOUT_S)
    return list(answer.traces)


def to_json(trace: trace_pb2.RequestTrace) -> dict[str, Any]:
    """The message with its protobuf field names. Numbers stay numbers; unmeasured fields are absent."""
    found: dict[str, Any] = MessageToDict(
        trace, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for attempt in found["attempts"]:
        for holder in (attempt, attempt.get("sent", {})):
            for name in ("bytes", "sent_bytes", "hidden_bytes"):  # protobuf's JSON writes 64-bit numbers as text
                if name in holder:
                    holder[name] = int(holder[name])
    return found


def show_list(traces: list[trace_pb2.RequestTrace], console: Console) -> None:
    if not traces:
        console.print("no request has ended yet")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # an id and a long error code fit 80 columns
    table.add_column("request", no_wrap=True)
    table.add_column("end", overflow="fold")
    for column in ("prompt", "tokens", "first ms", "total ms", "KV MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for trace in traces:
        last = trace.attempts[-1] if trace.attempts else trace_pb2.Attempt()
        table.add_row(
            trace.request_id,
            trace.error or trace.state,
            str(trace.prompt_tokens),
            str(trace.completion_tokens),
            f"{1000 * trace.first_token_s:.1f}" if trace.HasField("first_token_s") else "–",
            f"{1000 * trace.total_s:.1f}",
            f"{last.bytes / 1e6:.2f}" if last.bytes else "–",
        )
    console.print(table)
