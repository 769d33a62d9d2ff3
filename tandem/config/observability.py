"""What a cluster tells of itself: the `observability` section of its configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen
from tandem.config.log_format import LogFormat


class OtlpTls(Frozen):
    """PEM files for an https endpoint."""

    ca: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Signed the collector's certificate; unset: one of the system's authorities did."
    )
    cert: Annotated[str, Field(min_length=1)] | None = Field(None, description="What the collector is shown.")
    key: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _cert_has_key(self) -> OtlpTls:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.key: expected exactly when tls.cert is given")
        return self


class TracingSpec(Frozen):
    """Where the routers send OpenTelemetry traces (docs/observability.md)."""

    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")] | None = Field(
        None,
        description="A collector: http://HOST:4317 (grpc), http://HOST:4318 (http), or https; unset: none.",
    )
    otlp_protocol: Literal["grpc", "http"] = "grpc"
    headers_file: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="File with a `name: value` line for each header that the collector wants (API keys)."
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="Share of the requests traced that come without a `traceparent`; those with one decide it."
    )
    tls: OtlpTls | None = None

    @model_validator(mode="after")
    def _tls_needs_https(self) -> TracingSpec:
        if self.tls is not None and not (self.otlp_endpoint or "").startswith("https://"):
            raise ValueError(f"tls: expected an https:// otlp_endpoint with it, got {self.otlp_endpoint!r}")
        return self


class LogsSpec(Frozen):
    format: LogFormat = LogFormat.TEXT


class MetricsSpec(Frozen):
    enabled: bool = Field(True, description="false: the routers count nothing, and /metrics is not there.")


class CostSpec(Frozen):
    """What the cluster's time costs, for the metrics of cost."""

    per_rank_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Price of one rank (one device) for an hour, in whatever currency; unset: no such metrics."
    )


class ObservabilitySpec(Frozen):
    tracing: TracingSpec = TracingSpec()
    logs: LogsSpec = LogsSpec()
    metrics: MetricsSpec = MetricsSpec()
    cost: CostSpec = CostSpec()
