"""What /metrics shows of workers, objectives, cost and the router itself; and that nobody can make it grow."""

import asyncio
import json
import logging
from typing import Any

import pytest

from router.observe.metrics.cost import CostMeter
from router.observe.slo import SloOutcome, slo_outcome
from router.requests.output import Final, Timeline, Usage
from router.testing.stub_worker import until
from router.workers.meter_history import MeterHistory
from tandem.config.log_format import LogFormat
from tandem.config.observability import CostSpec, MetricsSpec, ObservabilitySpec
from tandem.config.router import ClassSpec
from tandem.errors import ErrorCode
from tandem.request import FinishReason, RequestState
from tandem.telemetry.logs import JsonFormatter, TextFormatter, setup_logging
from tandem.testing.models import FakeClock
from tandem.v1 import cluster_pb2, worker_pb2
from tests.unit.router.conftest import Cluster
from worker.meters import STEP_BOUNDS_S

DECODE = 'model="tiny",role="decode",worker="d0"'
ASK = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}


def meters(flops: float = 0.0, stepping_s: float = 0.0, **more: Any) -> worker_pb2.WorkerMeters:
    counts = [0] * (len(STEP_BOUNDS_S) + 1)
    counts[2] = 3
    step = worker_pb2.StepMeter(kind="decode", counts=counts, total_s=stepping_s)
    return worker_pb2.WorkerMeters(
        steps=[step], flops=flops, memory_bytes=10 * flops, peak_flops_per_s=100, peak_memory_bytes_per_s=2000, **more
    )


async def test_workers_are_shown_as_they_report_and_as_they_should_be(bare: Cluster) -> None:
    counted = {"decode_tokens": 7, "preemptions": 2, "proposed_tokens": 5, "accepted_tokens": 3, "proposer": "draft"}
    bare.decode.meters = meters(flops=1e9, stepping_s=0.01, **counted)
    bare.decode.meters.links.add(peer_worker="p0", transport="mapped", bytes=1 << 20, latency_s=0.001, bytes_per_s=5e8)
    roles = {"p0": cluster_pb2.ROLE_PREFILL, "d0": cluster_pb2.ROLE_DECODE, "d1": cluster_pb2.ROLE_DECODE}
    bare.controller.places = [
        cluster_pb2.WorkerPlace(worker_id=name, model="tiny", role=role, ranks=1, restarts=number)
        for number, (name, role) in enumerate(roles.items())
    ]
    await bare.list_workers(bare.prefill, bare.decode)
    metric = bare.metric
    assert metric(f"tandem_worker_up{{{DECODE}}}") == 1
    refused = (
        'tandem_worker_proposed_tokens_total{model="tiny",outcome="unused",proposer="draft",role="decode",worker="d0"}'
    )
    assert metric(refused) == 2
    assert metric('tandem_worker_up{model="tiny",role="decode",worker="d1"}') == 0
    assert metric(f"tandem_worker_restarts_total{{{DECODE}}}") == 1
    lines = [line for line in bare.app.metrics.render().decode().splitlines() if 'worker="d0"' in line]
    blocks = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tandem_worker_blocks{")]
    assert (len(blocks), sum(blocks)) == (4, bare.decode.total_blocks)
    shown = {line.split("{")[0] for line in lines}
    assert {
        "tandem_worker_tokens_total", "tandem_worker_preemptions_total", "tandem_worker_flops_total",
        "tandem_worker_memory_bytes_total", "tandem_worker_peak_flops", "tandem_worker_step_seconds_bucket",
        "tandem_worker_link_bytes_total", "tandem_worker_link_bytes_per_second", "tandem_worker_link_latency_seconds",
        "tandem_worker_slow_links",
        "tandem_worker_requests", "tandem_worker_waiting_tokens",
    } <= shown  # fmt: skip
    assert any('le="+Inf"' in line and line.endswith(" 3.0") for line in lines)
    assert metric("tandem_build_info") == 1
    assert metric("process_resident_memory_bytes") > 0

    await bare.list_workers(bare.prefill)
    assert metric(f"tandem_worker_up{{{DECODE}}}") == 0
    assert metric("tandem_worker_preemptions_total") == 0  # of a worker that is gone nothing stays


async def test_links_over_a_slower_transport_are_counted_also_while_they_rest(bare: Cluster) -> None:
    bare.decode.meters = meters()
    slow = "nccl: torch has no NCCL"
    states = [("ready", slow), ("idle", slow), ("ready", ""), ("down", slow), ("connecting", slow)]
    for rank, (state, reason) in enumerate(states):
        bare.decode.meters.links.add(
            peer_worker="p0", rank=rank, transport="tcp", state=state, reason=reason, bytes=1, latency_s=0.001
        )
    bare.decode.meters.links.add(peer_worker="p0", transport="mapped", state="ready", bytes=1, latency_s=0.001)
    await bare.list_workers(bare.prefill, bare.decode)
    labels = 'model="tiny",peer="p0",role="decode"'
    assert bare.metric(f'tandem_worker_slow_links{{{labels},transport="tcp",worker="d0"}}') == 2
    assert bare.metric(f'tandem_worker_slow_links{{{labels},transport="mapped",worker="d0"}}') == 0


async def test_host_tiers_are_shown_of_workers_that_have_one(bare: Cluster) -> None:
    bare.decode.host_blocks = worker_pb2.HostBlocks(free=3, used=5, total=8)
    bare.decode.meters = meters(host_blocks_out=20, host_blocks_in=12)
    await bare.list_workers(bare.prefill, bare.decode)
    assert bare.metric('tandem_worker_host_blocks{model="tiny",role="decode",state="used",worker="d0"}') == 5
    assert bare.metric(f'tandem_worker_host_moved_blocks_total{{direction="out",{DECODE}}}') == 20
    assert bare.metric(f"tandem_worker_host_hit_tokens_total{{{DECODE}}}") == 12 * 16
    lines = bare.app.metrics.render().decode().splitlines()
    assert not [line for line in lines if line.startswith("tandem_worker_host") and 'worker="d0"' not in line]


async def test_clients_cannot_make_the_metrics_grow(cluster: Cluster) -> None:
    cluster.says("Hello")

    def series() -> set[str]:
        return {line.rpartition(" ")[0] for line in cluster.app.metrics.render().decode().splitlines()}

    async def ask(number: int) -> None:
        headers = {
            "x-tandem-tenant": f"tenant-{number}",
            "traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01",
            "x-request-id": f"id-{number}",
        }
        await cluster.http.post("/v1/completions", json=ASK | {"user": f"u{number}"}, headers=headers)
        await cluster.http.post("/v1/completions", json=ASK | {"model": f"m{number}"}, headers=headers)
        await cluster.http.post("/v1/completions", json=ASK, headers={"x-tandem-priority": f"class-{number}"})
        await cluster.http.get(f"/nowhere-{number}")

    await ask(0)
    await cluster.settled()
    before = series()
    for number in range(1, 30):
        await ask(number)
    await cluster.settled()
    assert series() - before == set()


@pytest.fixture
def observability(request: pytest.FixtureRequest) -> ObservabilitySpec:
    chosen: ObservabilitySpec = getattr(request, "param", ObservabilitySpec())
    return chosen


OFF = ObservabilitySpec(metrics=MetricsSpec(enabled=False))


@pytest.mark.parametrize("observability", [OFF], indirect=True)
async def test_switched_off_nothing_is_counted_and_all_else_works(cluster: Cluster) -> None:
    cluster.says("Hello")
    assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200
    answer = await cluster.http.get("/metrics")
    assert answer.status_code == 404
    assert "observability.metrics.enabled" in answer.json()["error"]["message"]
    await cluster.settled()


def final(ttft_s: float, decode_s: float, tokens: int) -> Final:
    line = Timeline(0, 0, 0, decode_s, ttft_s, 0, 0, 0, 0, 0, "", "")
    return Final(FinishReason.STOP, Usage(1, tokens, 0), line)


BOTH = ClassSpec(name="c", ttft_slo_s=1.0, tpot_slo_s=0.1)
F, R, C = RequestState.FAILED, RequestState.REJECTED, RequestState.CANCELLED


@pytest.mark.parametrize(
    ("objectives", "answer", "state", "code", "outcome"),
    [
        (BOTH, final(1.0, 1.0, 11), RequestState.FINISHED, None, SloOutcome.MET),
        (BOTH, final(1.1, 1.0, 11), RequestState.FINISHED, None, SloOutcome.MISSED_TTFT),
        (BOTH, final(1.0, 1.1, 11), RequestState.FINISHED, None, SloOutcome.MISSED_TPOT),
        (BOTH, final(1.1, 1.1, 11), RequestState.FINISHED, None, SloOutcome.MISSED_BOTH),
        (BOTH, final(1.0, 0.0, 1), RequestState.FINISHED, None, SloOutcome.MET),
        (ClassSpec(name="c"), final(99.0, 99.0, 2), RequestState.FINISHED, None, SloOutcome.MET),
        (BOTH, None, F, ErrorCode.WORKER_LOST, SloOutcome.FAILED),
        (BOTH, None, R, ErrorCode.OVERLOADED, SloOutcome.FAILED),
        (BOTH, None, R, ErrorCode.CONTEXT_EXCEEDED, None),
        (BOTH, None, C, ErrorCode.CANCELLED, None),
    ],
)
def test_what_counts_as_goodput(
    objectives: ClassSpec, answer: Final | None, state: RequestState, code: ErrorCode | None, outcome: SloOutcome | None
) -> None:
    assert slo_outcome(objectives, answer, state, code) is outcome


def test_mfu_and_mbu_are_shares_of_the_latest_steps() -> None:
    history = MeterHistory()
    assert history.mfu(0.0) is history.ridge is None
    history.take(meters(flops=0, stepping_s=0), 0.0)
    assert history.ridge == pytest.approx(0.05)
    assert history.mfu(1.0) is None  # nothing was done
    history.take(meters(flops=50, stepping_s=1.0), 2.0)
    assert history.mfu(2.0) == pytest.approx(0.5)
    assert history.mbu(2.0) == pytest.approx(0.25)
    history.take(meters(flops=60, stepping_s=2.0), 30.0)
    assert history.mfu(30.0) == pytest.approx(0.1)  # the first second is long ago
    assert history.mfu(300.0) is None  # and now the other, too


def test_steps_that_do_not_fit_are_left_out() -> None:
    history = MeterHistory()
    told = meters()
    told.steps.add(kind="decode", counts=[1])
    told.steps.add(kind="x" * 1000, counts=[0] * (len(STEP_BOUNDS_S) + 1))
    history.take(told, 0.0)
    assert history.latest is not None
    assert [each.kind for each in history.latest.steps] == ["decode"]


def test_time_costs_and_tokens_share_it() -> None:
    clock = FakeClock(0.0)
    meter = CostMeter(36.0, clock)
    meter.set_ranks({("m", "prefill"): 1, ("m", "decode"): 3})
    assert meter.per_million_tokens({"m": 0}) == {}
    clock.advance(100.0)
    assert meter.per_million_tokens({"m": 2_000}) == {"m": pytest.approx(1e6 * 4.0 / 2000)}
    assert meter.total == {("m", "prefill"): pytest.approx(1.0), ("m", "decode"): pytest.approx(3.0)}
    assert meter.per_hour() == {("m", "prefill"): pytest.approx(36.0), ("m", "decode"): pytest.approx(108.0)}
    clock.advance(10.0)
    assert meter.per_million_tokens({"m": 100}) == {}  # a worker was replaced: the window begins anew
    clock.advance(10.0)
    assert meter.per_million_tokens({"m": 200}) == {"m": pytest.approx(1e6 * 0.4 / 100)}


COST = ObservabilitySpec(cost=CostSpec(per_rank_hour=3600.0))


@pytest.mark.parametrize("observability", [COST], indirect=True)
async def test_cost_counts_the_workers_there_should_be(bare: Cluster) -> None:
    bare.controller.places = [
        cluster_pb2.WorkerPlace(worker_id="d0", model="tiny", role=cluster_pb2.ROLE_DECODE, ranks=2, restarts=0)
    ]
    await bare.list_workers(bare.prefill, bare.decode)
    assert bare.metric('tandem_cost_per_hour{model="tiny",role="decode"}') == 7200
    first = bare.metric("tandem_cost_total")
    await until(lambda: bare.metric("tandem_cost_total") > first)


async def test_logs_name_request_and_trace_and_never_what_was_said(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """For a requeued request, at the most verbose level."""
    cluster.says("classified answer")
    cluster.decode.behaviour.fail_handoffs = 1
    trace_id = "a" * 32
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    with caplog.at_level(logging.DEBUG):
        answer = await cluster.http.post("/v1/completions", json=ASK | {"prompt": "top secret"}, headers=headers)
        await cluster.settled()
    said = [JsonFormatter("router").format(record) for record in caplog.records]
    lines = [json.loads(line) for line in said]
    (again,) = [line for line in lines if line["message"] == "request requeued"]
    assert (again["request"], again["trace_id"]) == (answer.headers["x-request-id"], trace_id)
    assert again["level"] == "info"
    assert not any("secret" in line or "classified" in line for line in said)
    assert "secret" not in cluster.app.metrics.render().decode()


def test_the_format_of_logs_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        for log_format, formatter in ((LogFormat.JSON, JsonFormatter), (LogFormat.TEXT, TextFormatter)):
            setup_logging(process="p", log_format=log_format)
            assert isinstance(root.handlers[0].formatter, formatter)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


VLLM_NAMES = {
    "vllm:time_to_first_token_seconds_count": "tandem_ttft_seconds_count",
    "vllm:time_to_first_token_seconds_sum": "tandem_ttft_seconds_sum",
    "vllm:inter_token_latency_seconds_count": "tandem_itl_seconds_count",
    "vllm:request_time_per_output_token_seconds_sum": "tandem_tpot_seconds_sum",
    "vllm:request_queue_time_seconds_sum": "tandem_queue_seconds_sum",
    "vllm:e2e_request_latency_seconds_sum": "tandem_e2e_seconds_sum",
    'vllm:e2e_request_latency_seconds_bucket{le="300.0",': 'tandem_e2e_seconds_bucket{le="300.0",',
    "vllm:prompt_tokens_total": 'tandem_tokens_total{kind="prompt"',
    "vllm:generation_tokens_total": 'tandem_tokens_total{kind="completion"',
    "vllm:prefix_cache_queries_total": 'tandem_tokens_total{kind="prompt"',
    "vllm:prefix_cache_hits_total": 'tandem_tokens_total{kind="cached"',
}


PICKED = ObservabilitySpec(metrics=MetricsSpec(model_server_protocol=True))
PICKER_NAMES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


@pytest.mark.parametrize("observability", [PICKED, ObservabilitySpec()], indirect=True, ids=["on", "off"])
async def test_an_endpoint_picker_finds_the_gauges_that_it_looks_for(
    cluster: Cluster, observability: ObservabilitySpec
) -> None:
    """Without labels: one value for each router."""
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.hold_prefills = True
    ask = asyncio.create_task(cluster.http.post("/v1/completions", json=ASK))
    await until(lambda: cluster.app.dispatcher.active == 1)
    text = (await cluster.http.get("/metrics")).text
    found = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("vllm:")}
    if observability is not PICKED:
        assert found == {}
    else:
        assert tuple(found) == PICKER_NAMES
        assert found["vllm:num_requests_waiting"] + found["vllm:num_requests_running"] == 1
        assert 0 <= found["vllm:kv_cache_usage_perc"] < 1
    ask.cancel()


@pytest.mark.parametrize("observability", [PICKED], indirect=True, ids=["on"])
async def test_what_reads_vllms_metrics_finds_tandems(cluster: Cluster) -> None:
    cluster.prefill.behaviour.cached_tokens = 1
    assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200
    for theirs, ours in VLLM_NAMES.items():
        assert cluster.metric(theirs) == cluster.metric(ours) > 0, theirs
    lines = (await cluster.http.get("/metrics")).text.splitlines()
    labelled = [line for line in lines if line.startswith("vllm:") and "{" in line]
    assert all('model_name="tiny"' in line and "kind=" not in line for line in labelled)
