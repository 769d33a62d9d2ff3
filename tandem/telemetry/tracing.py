"""Export of OpenTelemetry traces. The only module that imports its SDK, imported only if traces are exported.

Finished spans come from several services. Each service instance has its own tracer provider, and all share one
exporter. Not thread-safe: one thread calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tandem.config.observability import TracingSpec
from tandem.errors import ConfigError
from tandem.telemetry.spans import FinishedSpan, Service
from tandem.telemetry.trace_context import TraceContext
from tandem.version import tandem_version

HTTP_PATH = "/v1/traces"  # the protocol's default, if the endpoint has no path
EXPORT_TIMEOUT_S = 5.0  # including the exporter's own retries


class Tracing:
    """Converts lists of finished spans to traces and sends them."""

    def __init__(self, spec: TracingSpec, cluster: str) -> None:
        """Raises ConfigError if a file of `spec` cannot be read."""
        self._exporter = _exporter(spec)
        self._cluster = cluster
        self._ids = _GivenTraceIds()
        self._ended = _Collector()
        self._tracers: dict[tuple[Service, str], trace.Tracer] = {}
        # The SDK logs every failed batch; our caller logs the failure once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def add(self, spans: Sequence[FinishedSpan], context: TraceContext) -> None:
        """Adds one request's spans, parents first, to the next `export`."""
        made: list[Span | trace.Span] = []
        for span in spans:
            tracer = self._tracer(span.service, span.instance)
            self._ids.next_trace_id = int(context.trace_id, 16)
            parent = _remote(context) if span.parent is None else trace.set_span_in_context(made[span.parent])
            begun = tracer.start_span(
                span.name,
                context=parent,
                kind=SpanKind.SERVER if span.parent is None else SpanKind.INTERNAL,
                attributes=dict(span.attributes),
                links=[trace.Link(made[index].get_span_context()) for index in span.links],
                start_time=_ns(span.start_s),
            )
            if span.error is not None:
                begun.set_attribute("error.type", span.error)
                begun.set_status(Status(StatusCode.ERROR, span.error))
            made.append(begun)
        for span, begun in zip(spans, made, strict=True):
            begun.end(_ns(max(span.start_s, span.end_s)))

    def export(self) -> bool:
        """Sends the spans added since the last call; False if the collector did not accept them. May block for
        EXPORT_TIMEOUT_S."""
        spans, self._ended.spans = self._ended.spans, []
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _tracer(self, service: Service, instance: str) -> trace.Tracer:
        if (tracer := self._tracers.get((service, instance))) is None:
            resource = Resource.create(
                {
                    "service.name": service.value,
                    "service.namespace": self._cluster,
                    "service.instance.id": instance,
                    "service.version": tandem_version(),
                }
            )
            provider = TracerProvider(
                sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, id_generator=self._ids
            )
            provider.add_span_processor(self._ended)
            tracer = self._tracers[service, instance] = provider.get_tracer("tandem", tandem_version())
        return tracer


class _GivenTraceIds(RandomIdGenerator):
    """Uses the trace id that the logs already show, instead of a new one."""

    next_trace_id = 0

    def generate_trace_id(self) -> int:
        return self.next_trace_id


class _Collector(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _remote(context: TraceContext) -> Context:
    if context.parent_id is None:
        return Context()
    caller = SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([context.state] if context.state else []),
    )
    return trace.set_span_in_context(NonRecordingSpan(caller), Context())


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)


def _exporter(spec: TracingSpec) -> SpanExporter:
    headers = {} if spec.headers_file is None else read_headers(Path(spec.headers_file))
    tls, endpoint = spec.tls, spec.otlp_endpoint or ""
    if spec.otlp_protocol == "http":
        return HttpExporter(
            endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + HTTP_PATH,
            certificate_file=tls.ca if tls else None,
            client_key_file=tls.key if tls else None,
            client_certificate_file=tls.cert if tls else None,
            headers=headers,
            timeout=EXPORT_TIMEOUT_S,
        )
    secure = endpoint.startswith("https://")
    credentials = None
    if secure:
        credentials = grpc.ssl_channel_credentials(
            *((_bytes("ca", tls.ca), _bytes("key", tls.key), _bytes("cert", tls.cert)) if tls else ())
        )
    return GrpcExporter(
        endpoint, insecure=not secure, credentials=credentials, headers=headers, timeout=EXPORT_TIMEOUT_S
    )


def read_headers(path: Path) -> dict[str, str]:
    """Parses `name: value` lines. Raises ConfigError that names the file and line, but never a value."""
    headers: dict[str, str] = {}
    for number, line in enumerate(_read("headers_file", path).decode("utf-8", "replace").splitlines(), 1):
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not colon or not name.strip() or not value.strip():
            raise ConfigError(
                f"observability.tracing.headers_file: {path}, line {number}: expected `name: value`",
                field="observability.tracing.headers_file",
            )
        headers[name.strip().lower()] = value.strip()
    return headers


def _bytes(name: str, path: str | None) -> bytes | None:
    return None if path is None else _read(f"tls.{name}", Path(path))


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"observability.tracing.{field}: cannot read {path} ({error.strerror})",
            field=f"observability.tracing.{field}",
        ) from None
