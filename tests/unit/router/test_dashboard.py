"""The dashboard's pages and API on a real router before stub workers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import msgspec
import pytest

from router.dashboard.routes import STATIC
from router.dashboard.snapshot import VERSION, RequestTimeline, Snapshot
from router.observe.trace_store import MAX_TRACES
from router.testing.stub_worker import until
from tandem.config.router import RouterSpec
from tandem.testing.models import FakeClock
from tandem.v1 import worker_pb2
from tests.unit.router.conftest import Cluster
from worker.meters import STEP_BOUNDS_S

MODEL = "tiny"
PROMPT = "The launch code is swordfish"
API = "/dashboard/api/v1"


async def look(cluster: Cluster) -> Snapshot:
    """After the time for which the router gives the same picture again."""
    await asyncio.sleep(0.45)
    reply = await cluster.http.get(f"{API}/snapshot")
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=Snapshot)


async def timeline(cluster: Cluster, request_id: str) -> RequestTimeline:
    reply = await cluster.http.get(f"{API}/requests/{request_id}")
    return msgspec.json.decode(reply.content, type=RequestTimeline)


async def ask(cluster: Cluster, prompt: str = PROMPT, **options: Any) -> str:
    """Returns the request's id."""
    reply = await cluster.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt} | options)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"].rpartition("-")[2])


async def test_a_router_without_workers_shows_that(bare: Cluster) -> None:
    found = await look(bare)
    assert (found.version, found.router_id, found.cluster, found.ready) == (VERSION, "router-0", "test", False)
    assert (found.workers, found.flows, found.requests, found.events) == ([], [], [], [])
    assert found.latency[0].ttft.p50 is None
    assert found.cache.redis == "none"


async def test_a_worker_shows_what_its_steps_reach_of_its_peaks(bare: Cluster) -> None:
    bare.decode.meters = worker_pb2.WorkerMeters(peak_flops_per_s=4e12, peak_memory_bytes_per_s=2e12)
    await bare.list_workers(bare.decode)
    [worker] = (await look(bare)).workers
    assert (worker.mfu, worker.mbu, worker.ridge) == (None, None, 2.0)  # no steps yet
    link = next(iter(bare.app.service.dispatcher.fleet.workers())).link
    step = worker_pb2.StepMeter(kind="decode", counts=[0] * (len(STEP_BOUNDS_S) + 1), total_s=1.0)
    bare.decode.meters.flops, bare.decode.meters.memory_bytes = 1e12, 1e12
    bare.decode.meters.steps.append(step)
    link.meters.take(bare.decode.meters, time.monotonic())
    [worker] = (await look(bare)).workers
    assert (worker.mfu, worker.mbu, worker.ridge) == (0.25, 0.5, 2.0)


async def test_requests_show_in_every_part(cluster: Cluster) -> None:
    tokens = cluster.says("Hello, world.")
    ids = [await ask(cluster) for _ in range(3)]
    await cluster.settled()
    found = await look(cluster)
    assert found.ready
    assert [(each.worker_id, each.role, each.state, each.health) for each in found.workers] == [
        ("p0", "prefill", "ready", "healthy"), ("d0", "decode", "ready", "healthy")
    ]  # fmt: skip
    assert [each.blocks.total for each in found.workers] == [64, 64]
    [flow] = found.flows
    assert (flow.prefill_worker, flow.decode_worker, flow.handoffs, flow.failures) == ("p0", "d0", 3, 0)
    assert flow.bytes > 0
    assert flow.bytes_per_s > 0
    assert [each.name for each in found.queues] == ["interactive", "batch"]
    [minute, *_] = found.latency
    assert (minute.ttft.count, minute.e2e.count, minute.tpot.count) == (3, 3, 3)
    assert minute.itl.count == 3 * (len(tokens) - 1)
    assert sum(found.history.output_tokens) == 3 * len(tokens)
    assert sum(found.history.requests) == 3
    assert [each.request_id for each in found.requests] == ids[::-1]
    assert {each.state for each in found.requests} == {"finished"}
    assert found.placements == {"handoff_configured": 3}
    decision = found.decisions[0]
    assert (decision.request_id, decision.prefill_worker, decision.decode_worker) == (ids[-1], "p0", "d0")
    assert [each.text for each in found.events if each.kind == "worker_joined"] == ["joined", "joined"]
    assert (found.scaling.prefill_ready, found.scaling.decode_ready, found.scaling.decisions) == (1, 1, [])


async def test_a_request_shows_while_it_runs_and_its_timeline_after_it(cluster: Cluster) -> None:
    cluster.says("one two three " * 10)
    cluster.decode.behaviour.token_delay_s = 0.3
    asked = asyncio.create_task(ask(cluster, max_tokens=100))
    await until(lambda: any(run.answer_tokens > 1 for run in cluster.app.dispatcher.running()))
    [row, *_] = (await look(cluster)).requests
    assert row.state == "decoding"
    assert row.ttft_s is not None
    live = await timeline(cluster, row.request_id)
    assert {"queue", "reserve", "prefill"} <= {span.stage for span in live.attempts[0].spans}
    cluster.decode.behaviour.token_delay_s = 0.0
    assert await asked == row.request_id
    for name in (row.request_id, f"cmpl-{row.request_id}"):
        done = await timeline(cluster, name)
        assert done.request.state == "finished"
    [attempt] = done.attempts
    assert [span.stage for span in attempt.spans][-1] == "decode"
    assert (attempt.prefill_worker, attempt.decode_worker) == ("p0", "d0")
    assert attempt.bytes > 0


async def test_failed_handoffs_and_migrations_are_events(cluster: Cluster) -> None:
    cluster.says("fine")
    cluster.decode.behaviour.fail_handoffs = 1
    await ask(cluster)
    found = await look(cluster)
    kinds = {event.kind: event for event in found.events}
    assert kinds["handoff_failed"].subject == "p0 → d0"
    assert kinds["migration"].subject == "d0"
    assert found.flows[0].failures == 1
    assert found.requests[0].attempts == 2


async def test_a_lost_worker_is_an_event_and_shows_as_lost(cluster: Cluster) -> None:
    await cluster.decode.kill()
    await until(lambda: not cluster.app.service.ready)
    found = await look(cluster)
    assert [(each.worker_id, each.state) for each in found.workers] == [("p0", "ready"), ("d0", "link_lost")]
    texts = {(event.subject, event.text) for event in found.events}
    assert {("d0", "link lost"), ("router-0", "not ready")} <= texts
    assert (found.ready, found.scaling.decode_ready, found.scaling.decode_total) == (False, 0, 1)


async def test_no_prompt_and_no_answer_is_ever_shown(cluster: Cluster) -> None:
    cluster.says("secret marmalade")
    cluster.decode.behaviour.fail_handoffs = 1
    request_id = await ask(cluster)
    await look(cluster)
    shown = [(await cluster.http.get(f"{API}/{path}")).text for path in ("snapshot", f"requests/{request_id}")]
    shown.append(cluster.app._snapshots.router_json().decode())
    for text in shown:
        assert request_id in text
        for word in ("swordfish", "marmalade", "launch"):
            assert word not in text
        prompt = cluster.tokenizer.encode(PROMPT, add_special_tokens=False)
        assert ",".join(map(str, prompt[:4])) not in text


async def test_many_viewers_cost_as_much_as_one_and_none_costs_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    view = cluster.app._snapshots._view
    take = view.take

    def counted() -> Snapshot:
        nonlocal made
        made += 1
        found: Snapshot = take()
        return found

    monkeypatch.setattr(view, "take", counted)
    monkeypatch.setattr(cluster.app._snapshots, "_clock", FakeClock())  # however long the twenty take
    await ask(cluster)
    assert made == 0
    replies = await asyncio.gather(*(cluster.http.get(f"{API}/snapshot") for _ in range(20)))
    assert len({reply.content for reply in replies}) == 1
    assert made == 1


async def test_lists_are_bounded(cluster: Cluster) -> None:
    cluster.says("x")
    for _ in range(7):
        await asyncio.gather(*(ask(cluster, max_tokens=1) for _ in range(20)))
    found = await look(cluster)
    assert len(found.requests) == 60
    assert len(found.decisions) == 50
    assert len(msgspec.json.encode(found)) < 64 << 10
    assert MAX_TRACES >= 140


async def test_of_many_requests_in_flight_the_oldest_and_the_newest_are_listed(cluster: Cluster) -> None:
    cluster.says("one two three " * 10)
    cluster.decode.behaviour.token_delay_s = 60.0
    dispatcher = cluster.app.dispatcher
    asked = [asyncio.create_task(ask(cluster)) for _ in range(70)]
    await until(lambda: len([*dispatcher.running(), *dispatcher.waiting()]) == 70)
    runs = sorted((*dispatcher.running(), *dispatcher.waiting()), key=lambda run: run.received_s, reverse=True)
    ids = [run.request.request_id for run in runs]
    assert [each.request_id for each in (await look(cluster)).requests] == ids[:30] + ids[-30:]
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{API}/requests/{'0' * 24}", 404), (f"{API}/requests/{'x' * 129}", 400), (f"{API}/requests/a%20b", 400),
        (f"{API}/requests/%3Cscript%3E", 400), (f"{API}/requests/", 404), (f"{API}/nothing", 404),
        ("/dashboard/static/nothing.js", 404), ("/dashboard/static/../edge.py", 404),
        ("/dashboard/static/%2e%2e%2fedge.py", 404), ("/dashboard/static/..%2f..%2fapp.py", 404),
        ("/dashboard/static/", 404),
    ],
)  # fmt: skip
async def test_bad_paths_are_refused(cluster: Cluster, path: str, status: int) -> None:
    reply = await cluster.http.get(path)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert "swordfish" not in reply.text


async def test_it_is_read_only(cluster: Cluster) -> None:
    for path in ("/dashboard/", f"{API}/snapshot", f"{API}/requests/abc", "/dashboard/static/app.js"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await cluster.http.request(method, path)).status_code == 405, (method, path)


class TestPage:
    async def test_the_page_and_all_it_names_are_served_from_here(self, bare: Cluster) -> None:
        moved = await bare.http.get("/dashboard")
        assert (moved.status_code, moved.headers["location"]) == (307, "dashboard/")
        page = (await bare.http.get("/dashboard", follow_redirects=True)).text
        names = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
        assert names
        for name in {path.name for path in STATIC.iterdir()} - {"index.html"}:
            text = (STATIC / name).read_text()
            names |= {f"static/{other}" for other in re.findall(r'from "\./([^"]+)"', text)}
            # The namespace of SVG is a name, not an address.
            assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert names == {f"static/{path.name}" for path in STATIC.iterdir()} - {"static/index.html"}
        for name in names:
            reply = await bare.http.get(f"/dashboard/{name}")
            assert reply.status_code == 200, name
            assert len(reply.content) > 100

    async def test_nothing_inline_and_nothing_from_elsewhere_may_run(self, bare: Cluster) -> None:
        for path in ("/dashboard", "/dashboard/", "/dashboard/static/app.js", f"{API}/snapshot"):
            headers = (await bare.http.get(path)).headers
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
        page = (await bare.http.get("/dashboard/")).text
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)

    async def test_an_unchanged_file_is_not_sent_again_and_data_is_never_stored(self, bare: Cluster) -> None:
        first = await bare.http.get("/dashboard/static/app.js")
        again = await bare.http.get("/dashboard/static/app.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await bare.http.get(f"{API}/snapshot")).headers["cache-control"] == "no-store"


class TestSwitchedOff:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, dashboard=False)

    async def test_there_is_no_dashboard(self, bare: Cluster) -> None:
        for path in ("/dashboard", "/dashboard/", f"{API}/snapshot"):
            assert (await bare.http.get(path)).status_code == 404


async def test_without_its_controller_the_router_shows_what_it_knows(cluster: Cluster) -> None:
    assert (await look(cluster)).controller
    await cluster.controller.stop()
    source = cluster.app._snapshots
    source._status = None
    found = await look(cluster)
    assert not found.controller
    assert [each.worker_id for each in found.workers] == ["p0", "d0"]
    assert [each.router_id for each in found.routers] == ["router-0"]


async def test_the_snapshot_is_strict_json(cluster: Cluster) -> None:
    """A browser's parser refuses NaN."""
    await ask(cluster)
    reply: httpx.Response = await cluster.http.get(f"{API}/snapshot")
    json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
