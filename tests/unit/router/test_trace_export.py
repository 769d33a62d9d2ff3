"""Traces leave by OTLP: what a collector gets, what is counted when it does not take it, and what it costs when off."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from router.observe import export as trace_export
from router.observe.export import ExportOutcome, TraceExport
from router.observe.trace import Trace
from router.testing.otlp import OtlpReceiver, otlp_receiver
from router.testing.stub_worker import until
from tandem.config.observability import ObservabilitySpec, OtlpTls, TracingSpec
from tandem.errors import ConfigError
from tandem.request import RequestState
from tandem.telemetry.trace_context import TraceContext
from tandem.v1 import inference_pb2
from tests.conftest import Authority
from tests.unit.router.conftest import Cluster

CONTEXT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
PATIENCE_S = 30.0  # less than the exporter goes on trying


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


def ended(request_id: str = "r", context: TraceContext | None = CONTEXT) -> Trace:
    trace = Trace(request_id, "m", 8, 0.0, context=context)
    trace.end(RequestState.REJECTED, None, None, 1.0)
    return trace


def started(spec: TracingSpec) -> TraceExport:
    export = TraceExport.of(spec, "test", "router-0")
    assert export is not None
    export.start()
    return export


def test_what_is_sampled_is_exported_at_the_latest_when_the_router_ends(receiver: OtlpReceiver, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("X-Api-Key: secret\n\n")
    headers = str(tmp_path / "headers")
    export = started(TracingSpec(otlp_endpoint=receiver.endpoint, headers_file=headers))
    export.offer(ended("a"))
    export.offer(ended("b", TraceContext(CONTEXT.trace_id, None, sampled=False)))
    export.offer(ended("c", None))
    export.close(PATIENCE_S)
    assert {each.attribute("gen_ai.response.id") for each in receiver.spans() if each.name == "request"} == {"a"}
    assert receiver.metadata["x-api-key"] == "secret"
    assert export.outcomes == {ExportOutcome.EXPORTED: 1}


def test_a_collector_that_refuses_or_is_away_costs_traces_and_nothing_else(receiver: OtlpReceiver) -> None:
    receiver.refuse = True
    refused = started(TracingSpec(otlp_endpoint=receiver.endpoint))
    away = started(TracingSpec(otlp_endpoint="http://127.0.0.1:9"))
    for export in (refused, away):
        export.offer(ended())
    refused.close(PATIENCE_S)
    began_s = time.monotonic()
    away.close()  # its retries go on in a thread that dies with the process
    assert time.monotonic() - began_s < PATIENCE_S
    assert refused.outcomes == {ExportOutcome.FAILED: 1}
    assert away.outcomes[ExportOutcome.EXPORTED] == 0


def test_what_finds_no_room_is_counted_as_dropped(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "MAX_QUEUED", 3)
    export = TraceExport.of(TracingSpec(otlp_endpoint=receiver.endpoint), "test", "router-0")
    assert export is not None
    for number in range(5):  # its thread does not run yet
        export.offer(ended(str(number)))
    assert export.outcomes == {ExportOutcome.DROPPED: 2}
    export.start()
    export.close(PATIENCE_S)
    assert export.outcomes == {ExportOutcome.DROPPED: 2, ExportOutcome.EXPORTED: 3}


def test_over_http_too(tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    export = started(TracingSpec(otlp_endpoint=f"http://127.0.0.1:{server.server_port}", otlp_protocol="http"))
    export.offer(ended())
    export.close(PATIENCE_S)
    server.shutdown()
    server.server_close()
    assert export.outcomes == {ExportOutcome.EXPORTED: 1}
    ((path, body),) = got
    assert path == "/v1/traces"
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    assert request.resource_spans[0].scope_spans[0].spans[0].trace_id.hex() == CONTEXT.trace_id


@pytest.mark.slow
def test_over_tls_only_to_a_collector_of_the_given_authority(authority: Callable[[str], Authority]) -> None:
    ours, others = authority("ours"), authority("others")
    own = ours.issue("localhost")
    pair = (Path(own["key"]).read_bytes(), Path(own["cert"]).read_bytes())
    with otlp_receiver(grpc.ssl_server_credentials([pair])) as receiver:
        for ca, exported in ((ours.ca, 1), (others.ca, 0)):
            export = started(TracingSpec(otlp_endpoint=receiver.endpoint, tls=OtlpTls(ca=str(ca))))
            export.offer(ended())
            export.close(PATIENCE_S)
            assert export.outcomes[ExportOutcome.EXPORTED] == exported


@pytest.mark.parametrize("text", ["no colon", ": value", "name:"])
def test_a_headers_file_that_is_none_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "headers").write_text(f"a: b\n{text}\n")
    with pytest.raises(ConfigError, match=r"headers_file: .*line 2") as wrong:
        TraceExport.of(
            TracingSpec(otlp_endpoint="http://127.0.0.1:9", headers_file=str(tmp_path / "headers")), "test", "r"
        )
    assert text not in wrong.value.message.partition("line 2")[2].removesuffix("expected `name: value`")
    with pytest.raises(ConfigError, match="cannot read"):
        TraceExport.of(
            TracingSpec(otlp_endpoint="http://127.0.0.1:9", headers_file=str(tmp_path / "none")), "test", "r"
        )


def test_without_an_endpoint_nothing_that_exports_is_imported() -> None:
    code = "import json, sys, router.app; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = (
        "tandem.telemetry.tracing",
        "opentelemetry.exporter",
    )  # what others import of it, where it is there, is theirs
    assert [name for name in json.loads(done.stdout) if name.startswith(ours)] == []
    assert TraceExport.of(TracingSpec(), "test", "router-0") is None


@pytest.fixture
def observability(receiver: OtlpReceiver) -> ObservabilitySpec:
    return ObservabilitySpec(tracing=TracingSpec(otlp_endpoint=receiver.endpoint, sample_ratio=0.0))


async def test_http_and_grpc_callers_have_their_traces_continued(cluster: Cluster, receiver: OtlpReceiver) -> None:
    cluster.says("Hello")
    by_http, by_grpc = "a" * 32, "b" * 32
    answer = await cluster.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "Hi", "max_tokens": 4},
        headers={"traceparent": f"00-{by_http}-{'1' * 16}-01", "tracestate": "shop=1"},
    )
    assert answer.status_code == httpx.codes.OK
    assert answer.headers["traceparent"] == f"00-{by_http}-{'1' * 16}-01"
    assert answer.headers["tracestate"] == "shop=1"
    metadata = (("traceparent", f"00-{by_grpc}-{'2' * 16}-01"),)
    ask = inference_pb2.GenerateRequest(model="tiny", prompt="Hi")
    async for _ in cluster.inference.Generate(ask, metadata=metadata):
        pass
    unsampled = {"traceparent": f"00-{'c' * 32}-{'3' * 16}-00"}
    await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"}, headers=unsampled)
    await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"})

    await until(lambda: len({each.span.trace_id for each in receiver.spans()}) == 2)
    roots = {each.span.trace_id.hex(): each.span for each in receiver.spans() if each.name == "request"}
    assert roots[by_http].parent_span_id.hex() == "1" * 16
    assert roots[by_grpc].parent_span_id.hex() == "2" * 16
    assert cluster.decode.works[cluster.decode.received[0][1]].trace_id == by_http  # for the worker's logs
    await until(lambda: cluster.metric('tandem_traces_total{outcome="exported"}') == 2)  # counted after the answer
    await cluster.settled()
