"""`tandem trace` after real requests to a whole cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtransfer.causes import HandoffCause
from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.e2e

LONG = "The history of Rome is long. " * 40


def trace_of(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """Once the prefill worker's word is in it."""
    deadline_s = time.monotonic() + 60
    while True:
        done = cluster.tandem("trace", request_id, "--json")
        assert done.returncode == 0, done.stderr
        trace: dict[str, Any] = json.loads(done.stdout)
        if "sent" in trace["attempts"][-1] or time.monotonic() > deadline_s:
            return trace
        time.sleep(0.1)


def test_a_handoff_is_traced_from_end_to_end(cluster: Cluster) -> None:
    body = {"model": "smollm2-135m", "prompt": f"{time.time()} {LONG}", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60)
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{request_id}"

    trace = trace_of(cluster, answer.json()["id"])
    assert (trace["request_id"], trace["state"]) == (request_id, "finished")
    attempt = trace["attempts"][-1]
    spans = {span["stage"]: (span["start_s"], span["end_s"]) for span in attempt["spans"]}
    assert list(spans)[:3] == ["queue", "reserve", "dispatch"]
    assert set(spans) == {
        "queue", "reserve", "dispatch", "connect", "prefill", "pieces", "verify", "first_token", "join", "decode",
    }  # fmt: skip
    assert all(0 <= start <= end <= trace["total_s"] for start, end in spans.values())
    # Both sides, laid on the router's clock, interlock as they did; a frame's way is allowed for.
    way_s = 0.02
    assert spans["reserve"][1] <= spans["prefill"][0] + way_s
    chain = [spans[stage] for stage in ("queue", "reserve", "dispatch", "prefill", "first_token")]
    assert [before[1] for before in chain[:-1]] == pytest.approx([after[0] for after in chain[1:]])
    assert chain[-1][1] == pytest.approx(trace["first_token_s"])
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


@pytest.mark.slow
def test_a_measured_load_is_recorded_and_the_record_is_a_trace(cluster: Cluster, tmp_path: Path) -> None:
    recorded, measured, simulated = (tmp_path / name for name in ("trace.jsonl", "measured.json", "simulated.json"))
    command = [sys.executable, "-m", "cluster", "trace", "record", str(recorded), "--requests", "6"]
    with subprocess.Popen(command, env=cluster.env, stderr=subprocess.PIPE, text=True) as recording:
        time.sleep(2.0)  # until it listens; what ends before is not in it, which the retry below allows for
        load = ["synthetic", "--arrivals", "poisson:8", "--lengths", "64:6", "--prefixes", "1:48:1", "--warm-up", "0"]
        for _ in range(5):
            done = cluster.tandem("bench", *load, "--requests", "6", "--ttft", "30", "--output", str(measured))
            assert done.returncode == 0, done.stderr
            if recording.poll() is not None:
                break
        assert recording.wait(timeout=30) == 0
    result = json.loads(measured.read_text())
    assert (result["finished"], result["failed"], result["attainment"]["joint"]) == (6, 0, 1.0)

    model = ["--model", "llama-3-8b", "--device", "h100", "--ttft", "30", "--json"]
    done = cluster.tandem("simulate", str(recorded), *model)
    assert done.returncode == 0, done.stderr
    simulated.write_text(done.stdout)
    found = json.loads(done.stdout)
    assert (found["requests"], found["finished"]) == (6, 6)
    assert found["possible_hit_rate"] > 0  # the shared prefix is in the record
    compared = cluster.tandem("compare", str(simulated), str(measured), "--json")
    assert compared.returncode == 0, compared.stderr
    names = {line["metric"] for line in json.loads(compared.stdout)["metrics"]}
    assert names >= {"ttft_s.p95", "tpot_s.p50", "attainment.joint", "goodput_per_s"}
    again = cluster.tandem("trace", "record", str(recorded))
    assert (again.returncode, "--overwrite" in again.stderr) == (2, True)
    cluster.assert_conserved()


@pytest.mark.slow
def test_bench_compares_the_ways_to_batch_on_clusters_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    """Beside one that runs under the default name and at the default ports."""
    measured = tmp_path / "batching.json"
    load = ["synthetic", "--arrivals", "poisson:8", "--lengths", "64:6:0:0.8", "--requests", "6", "--ttft", "60"]
    settings = ["--set", "control.backend=subprocess", "--set", "models.0.engine.kv_blocks=256"]
    compare = ["--compare", "batching", "--output", str(measured), *settings]
    done = cluster.tandem("bench", *load, *compare, timeout_s=600.0)
    assert done.returncode == 0, done.stderr
    (head,) = [line for line in done.stdout.splitlines() if "dynamic" in line]
    assert head.index("continuous") < head.index("static") < head.index("dynamic")
    results = json.loads(measured.read_text())["results"]
    assert {kind: (found["finished"], found["complete"]) for kind, found in results.items()} == {
        kind: (6, True) for kind in ("continuous", "static", "dynamic")
    }
    assert len({json.dumps(found["attainment"]) for found in results.values()}) == 1
    cluster.assert_conserved()


def test_an_unknown_request_is_one_line_that_says_what_to_do(cluster: Cluster) -> None:
    done = cluster.tandem("trace", "nobody")
    assert done.returncode == 2
    assert "tandem trace" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_status_tells_what_links_were_measured_at(cluster: Cluster) -> None:
    (link,) = cluster.worker("prefill")["links"]
    assert 0 < link["latency_s"] < 1
    assert cluster.worker("decode")["links"][0]["latency_s"] is None
    assert cluster.worker("prefill")["handoff_failures"].keys() <= set(HandoffCause)  # other tests break this cluster
