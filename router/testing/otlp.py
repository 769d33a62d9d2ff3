"""An OTLP receiver for tests and benchmarks: the gRPC service of a trace collector, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class GotSpan:
    """A received span with its resource. Times are Unix nanoseconds."""

    service: str
    instance: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def duration_s(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    def attribute(self, key: str) -> str | int | float | None:
        return _values(self.span.attributes).get(key)


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans. If `refuse` is set, answers UNAUTHENTICATED and keeps nothing."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.refuse = False
        self.metadata: dict[str, str | bytes] = {}
        self._lock = threading.Lock()
        self._spans: list[GotSpan] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        if self.refuse:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "refused by the test")
        with self._lock:
            self.metadata = dict(context.invocation_metadata())
            self._spans += _spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[GotSpan]:
        with self._lock:
            return list(self._spans)


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[GotSpan]:
    for group in request.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield GotSpan(str(resource["service.name"]), str(resource["service.instance.id"]), span)


def _values(attributes: Any) -> dict[str, str | int | float]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: common_pb2.AnyValue) -> str | int | float:
    kind = value.WhichOneof("value")
    found: str | int | float = getattr(value, kind) if kind else ""
    return found


@contextmanager
def otlp_receiver(credentials: grpc.ServerCredentials | None = None) -> Iterator[OtlpReceiver]:
    """A receiver that listens on loopback until the block ends."""
    server = grpc.server(ThreadPoolExecutor(2))
    receiver = OtlpReceiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    if credentials is None:
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        receiver.endpoint = f"https://localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
