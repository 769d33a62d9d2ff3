"""How `tandem trace` draws what the router kept."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from rich.console import Console

from cluster.cli.commands.status import show as show_status
from cluster.cli.commands.trace import show_list, to_json
from cluster.cli.request_trace import gantt, show
from tandem.v1 import cluster_pb2, trace_pb2, worker_pb2

SPANS = [
    ("queue", 0, 10), ("reserve", 10, 15), ("dispatch", 15, 18), ("connect", 17, 19), ("prefill", 18, 60),
    ("pieces", 32, 62), ("first_token", 60, 62), ("verify", 62, 72), ("join", 72, 73), ("decode", 73, 900),
]  # fmt: skip


def fixed(**fields: Any) -> trace_pb2.RequestTrace:
    """One handoff, in milliseconds."""
    attempt = trace_pb2.Attempt(
        prefill_worker="prefill-0", decode_worker="decode-0", bytes=3 << 20, blocks=4, pieces=6, sent_bytes=3 << 20,
        hidden_bytes=2 << 20, transports=["mapped", "tcp"], overlap_share=2 / 3, exposed_s=0.017,
        spans=[trace_pb2.Span(stage=name, start_s=start / 1000, end_s=end / 1000) for name, start, end in SPANS],
        sent=worker_pb2.SendStages(hidden_bytes=2 << 20),
    )  # fmt: skip
    values: dict[str, Any] = {
        "request_id": "0123456789abcdef01234567", "model": "tiny", "state": "finished", "prompt_tokens": 64,
        "completion_tokens": 8, "first_token_s": 0.062, "total_s": 0.9, "attempts": [attempt],
    }  # fmt: skip
    return trace_pb2.RequestTrace(**(values | fields))


def recording(width: int = 80) -> Console:
    return Console(record=True, width=width, file=io.StringIO())


def drawn(trace: trace_pb2.RequestTrace, width: int = 80) -> list[str]:
    console = recording(width)
    show(trace, console)
    return console.export_text().splitlines()


def bars(trace: trace_pb2.RequestTrace, width: int) -> dict[str, str]:
    """The bar of each stage."""
    table = gantt(trace.attempts[-1], width)
    names, cells = (list(table.columns[index].cells) for index in (0, 3))
    return {str(name): str(cell) for name, cell in zip(names, cells, strict=True)}


def test_the_gantt_of_a_handoff() -> None:
    """10 to 73 ms on 66 columns: about a millisecond each, after a margin of 3."""
    found = bars(fixed(), 66)
    assert list(found) == [
        "queue", "reserve", "dispatch", "connect", "prefill", "pieces", "first token", "verify", "join", "decode",
    ]  # fmt: skip
    begins = {name: len(bar) - len(bar.lstrip()) for name, bar in found.items()}
    ends = {name: len(bar) for name, bar in found.items()}
    assert found["queue"].startswith("◂")
    assert found["decode"].endswith("▸")
    assert found["first token"].strip().strip("█") == "◆"
    assert len(found["first token"].strip()) == pytest.approx(2 * 66 / 69.3 + 1, abs=1)
    assert abs(ends["dispatch"] - begins["prefill"]) <= 1
    assert begins["reserve"] < begins["connect"] <= begins["prefill"] < begins["pieces"] < begins["verify"]
    assert ends["reserve"] <= begins["connect"]
    assert abs(ends["pieces"] - begins["verify"]) <= 1
    assert ends["join"] <= 66
    assert ends["decode"] == 66
    assert len(found["prefill"].strip()) == pytest.approx(42 * 66 / 69.3, abs=1.5)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_terminal(width: int) -> None:
    chart = [line for line in drawn(fixed(), max(width, 60)) if "█" in line]
    assert len(chart) == 10
    assert max(len(line) for line in chart) <= max(width, 60)


def test_the_account_is_below() -> None:
    text = "\n".join(drawn(fixed()))
    assert "0123456789abcdef01234567  tiny" in text
    assert "64 prompt tokens" in text
    assert "prefill-0 → decode-0" in text
    assert "moved: 3.1 MB in 6 pieces, 4 blocks over mapped, tcp" in text
    assert "overlap: 67 %" in text
    assert "17.0 ms" in text
    assert "proposed" not in text


def test_what_was_proposed_is_told() -> None:
    assert "proposed tokens: 5 accepted, 3 unused" in drawn(fixed(accepted_tokens=5, unused_tokens=3))


def test_failed_attempts_say_their_cause() -> None:
    failed = trace_pb2.Attempt(
        prefill_worker="prefill-0", decode_worker="decode-1", error="handoff_failed", cause="digest_mismatch",
        message="piece 3 arrived corrupted", spans=[trace_pb2.Span(stage="queue", start_s=0, end_s=0.01)],
    )  # fmt: skip
    text = "\n".join(drawn(fixed(attempts=[failed, *fixed().attempts])))
    assert "attempt 1: prefill-0 → decode-1" in text
    assert "failed: handoff_failed (digest_mismatch): piece 3 arrived corrupted" in text
    assert "attempt 2: prefill-0 → decode-0" in text


def test_a_worker_whose_id_names_another_role_is_told_with_the_one_it_had_for_the_request() -> None:
    local = trace_pb2.Attempt(decode_worker="prefill-1")
    assert "prefill-1 (decode), without a handoff" in drawn(fixed(attempts=[local]))
    handed = trace_pb2.Attempt(prefill_worker="prefill-0", decode_worker="prefill-1")
    assert "prefill-0 → prefill-1 (decode)" in drawn(fixed(attempts=[handed]))


def test_a_request_that_no_worker_saw_is_shown_too() -> None:
    assert "no worker received it" in "\n".join(drawn(fixed(attempts=[], state="cancelled")))


def test_json_is_the_message_with_numbers_and_reads_back() -> None:
    found = json.loads(json.dumps(to_json(fixed())))
    assert found["attempts"][0]["bytes"] == 3 << 20
    assert found["attempts"][0]["sent"]["hidden_bytes"] == 2 << 20
    assert found["cached_tokens_decode"] == 0
    assert "received" not in found["attempts"][0]
    assert ParseDict(found, trace_pb2.RequestTrace()) == fixed()


def test_the_latest_fit_eighty_columns() -> None:
    console = recording()
    show_list([fixed(), fixed(state="failed", error="handoff_failed")], console)
    lines = console.export_text().splitlines()
    assert "0123456789abcdef01234567" in lines[1]
    assert "62.0" in lines[1]
    assert "handoff_failed" in lines[2]
    show_list([], console)
    assert "no request has ended yet" in console.export_text()


def test_status_shows_what_a_link_was_measured_at_and_nothing_where_it_was_not() -> None:
    measured = worker_pb2.LinkState(
        peer_worker="decode-0", transport="mapped", state="ready", bytes=5_000_000, latency_s=0.00021, bytes_per_s=2.5e9
    )
    unmeasured = worker_pb2.LinkState(
        peer_worker="prefill-0", transport="mapped", state="down", reason="the peer is gone"
    )
    workers = [
        cluster_pb2.WorkerStatus(
            info=cluster_pb2.WorkerInfo(worker_id=name, role=role),
            state="ready",
            live=worker_pb2.WorkerState(links=[link]),
        )
        for name, role, link in (
            ("prefill-0", cluster_pb2.ROLE_PREFILL, measured),
            ("decode-0", cluster_pb2.ROLE_DECODE, unmeasured),
        )
    ]
    console = recording(100)
    show_status(cluster_pb2.ClusterStatus(workers=workers), console)
    text = console.export_text()
    assert "link prefill-0/0 – decode-0/0: mapped ready, 210 µs, 2.50 GB/s, 5.0 MB" in text
    assert "link decode-0/0 – prefill-0/0: mapped down, 0 B: the peer is gone" in text
