"""`tandem trace` after real requests to a whole cluster."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from kvtransfer.causes import HandoffCause

pytestmark = pytest.mark.e2e

LONG = "The history of Rome is long. " * 40


def trace_of(cluster: Any, request_id: str) -> dict[str, Any]:
    """Once the prefill worker's word is in it."""
    deadline_s = time.monotonic() + 5
    while True:
        done = cluster.tandem("trace", request_id, "--json")
        assert done.returncode == 0, done.stderr
        trace: dict[str, Any] = json.loads(done.stdout)
        if "sent" in trace["attempts"][-1] or time.monotonic() > deadline_s:
            return trace
        time.sleep(0.1)


def test_a_handoff_is_traced_from_end_to_end(cluster: Any) -> None:
    body = {"model": "smollm2-135m", "prompt": f"{time.time()} {LONG}", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60)
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{request_id}"

    trace = trace_of(cluster, answer.json()["id"])
    assert (trace["request_id"], trace["state"]) == (request_id, "finished")
    attempt = trace["attempts"][-1]
    spans = {span["stage"]: (span["start_s"], span["end_s"]) for span in attempt["spans"]}
    assert list(spans)[:2] == ["queue", "reserve"]
    assert set(spans) == {
        "queue", "reserve", "connect", "prefill", "pieces", "verify", "first_token", "join", "decode",
    }  # fmt: skip
    assert all(0 <= start <= end <= trace["total_s"] for start, end in spans.values())
    # Both sides, laid on the router's clock, interlock as they did; a frame's way is allowed for.
    way_s = 0.02
    assert spans["reserve"][1] <= spans["prefill"][0] + way_s
    assert spans["prefill"][1] <= spans["first_token"][0] + way_s
    assert spans["prefill"][0] <= spans["pieces"][0] + way_s
    assert spans["pieces"][1] == spans["verify"][0] <= spans["verify"][1] == spans["join"][0] <= spans["join"][1]
    assert spans["join"][1] <= spans["decode"][0] + way_s
    assert attempt["bytes"] == attempt["sent_bytes"] > 0
    assert 0 <= attempt["hidden_bytes"] < attempt["bytes"]

    drawn = cluster.tandem("trace", request_id)
    assert drawn.returncode == 0, drawn.stderr
    assert {"queue", "pieces", "decode", "overlap:"} <= {line.split()[0] for line in drawn.stdout.splitlines() if line}
    listed = cluster.tandem("trace")
    assert request_id in listed.stdout
    cluster.assert_conserved()


def test_an_unknown_request_is_one_line_that_says_what_to_do(cluster: Any) -> None:
    done = cluster.tandem("trace", "nobody")
    assert done.returncode == 2
    assert "tandem trace" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_status_tells_what_links_were_measured_at(cluster: Any) -> None:
    (link,) = cluster.worker("prefill")["links"]
    assert 0 < link["latency_s"] < 1
    assert cluster.worker("decode")["links"][0]["latency_s"] is None
    assert cluster.worker("prefill")["handoff_failures"].keys() <= set(HandoffCause)  # other tests break this cluster
