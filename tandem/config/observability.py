"""Configuration of traces, logs, metrics and cost (`observability`)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen
from tandem.config.log_format import LogFormat


class OtlpTls(Frozen):
    """PEM files for an https endpoint."""

    ca: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="CA of the collector's certificate; unset: the system's CAs."
    )
    cert: Annotated[str, Field(min_length=1)] | None = Field(None, description="Client certificate.")
    key: Annotated[str, Field(min_length=1)] | None = Field(None, description="Key of the client certificate.")

    @model_validator(mode="after")
    def _cert_has_key(self) -> OtlpTls:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.key: expected together with tls.cert")
        return self


class TracingSpec(Frozen):
    """Export of OpenTelemetry traces by the routers (docs/observability.md)."""

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")] | None = Field(
        None,
        description="Collector: http://HOST:4317 (grpc), http://HOST:4318 (http), or https; unset: no traces.",
    )
    otlp_protocol: Literal["grpc", "http"] = Field("grpc", description="Protocol of otlp_endpoint.")
    headers_file: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="File of headers for the collector (API keys), one `name: value` per line."
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="Share of requests to trace; a request's own `traceparent` takes precedence."
    )
    tls: OtlpTls | None = None

    @model_validator(mode="after")
    def _tls_needs_https(self) -> TracingSpec:
        if self.tls is not None and not (self.otlp_endpoint or "").startswith("https://"):
            scheme = (self.otlp_endpoint or "none").partition(":")[0]  # the rest may hold a password
            raise ValueError(f"tls: expected an https:// otlp_endpoint, got {scheme}")
        return self


class LogTarget(StrEnum):
    FILES = "files"
    STDOUT = "stdout"


class LogsSpec(Frozen):
    format: LogFormat = Field(LogFormat.TEXT, description="Format of log lines.")
    target: LogTarget = Field(
        LogTarget.FILES,
        description="files: one for each process, in the state folder. stdout: `tandem up` prints the lines of all "
        "processes with their names; on other machines, the container there does.",
    )


LogLevel = Literal["debug", "info", "warning", "error"]


class LogLevels(Frozen):
    """Of one kind of process each, where it is another than `log_level`."""

    controller: LogLevel | None = Field(None, description="Log level of the controller. Unset: `log_level`.")
    router: LogLevel | None = Field(None, description="Log level of routers. Unset: `log_level`.")
    worker: LogLevel | None = Field(None, description="Log level of workers and their ranks. Unset: `log_level`.")


class MetricsSpec(Frozen):
    enabled: bool = Field(True, description="false: the routers keep no metrics and do not serve /metrics.")
    model_server_protocol: bool = Field(
        False,
        description="Also metrics under vLLM's names: the three gauges that the Gateway API's endpoint picker looks "
        "for (`vllm:num_requests_waiting`, `vllm:num_requests_running`, `vllm:kv_cache_usage_perc`), and those of "
        "latencies and tokens.",
    )


class CostSpec(Frozen):
    """Price of the cluster's time, for the cost metrics."""

    per_rank_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Price of one rank (one device) for an hour, in any currency; unset: no cost metrics."
    )


class ObservabilitySpec(Frozen):
    tracing: TracingSpec = TracingSpec()
    logs: LogsSpec = LogsSpec()
    metrics: MetricsSpec = MetricsSpec()
    cost: CostSpec = CostSpec()
