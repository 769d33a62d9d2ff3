"""Settings of the routers: ports, limits, classes of requests, placement."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from tandem.config.frozen import Frozen, Port, PositiveCount
from tandem.config.security import EdgeTlsSpec


class Disaggregation(StrEnum):
    ALWAYS = "always"  # every request uses a handoff while a prefill worker exists
    AUTO = "auto"  # prefill on the decode worker if it is clearly sooner and does not slow running decodes
    NEVER = "never"


class PolicyName(StrEnum):
    """Policies that choose workers (docs/routing.md). All but the first are baselines."""

    EXPECTED_TTFT = "expected_ttft"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    CACHE_ONLY = "cache_only"


class ClassSpec(Frozen):
    """One priority class of requests. Clients select it with `x-tandem-priority`."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="Value of `x-tandem-priority`.")]
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = Field(
        1.0, description="Relative share of dispatched prompt tokens while several classes wait."
    )
    ttft_slo_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Objective for time to first token; a request predicted to miss it is refused. Unset: it waits.",
    )
    tpot_slo_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Objective for time per output token, for goodput; no request is refused for it."
    )
    queue_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Longest time in the queue; unset: router.queue_timeout_s."
    )
    batch: bool = Field(False, description="Dispatched only while no request of another class waits.")


class IdempotencySpec(Frozen):
    """Requests with the header `idempotency-key`."""

    grace_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        30.0, description="A request goes on for this long after its last client has gone, so that a repeat finds it."
    )
    keep_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        600.0, description="A repeat gets an answer for this long after its end."
    )
    share: bool = Field(
        True,
        description="Answer a repeat also through another router: answers of up to 1 MiB are kept in Redis, with the "
        "text that they contain. Without Redis each router knows its own keys only.",
    )


class RouterSpec(Frozen):
    replicas: Annotated[int, Field(ge=0, le=64)] = Field(
        1,
        description="Number of routers that the cluster starts, without a leader. The first listens on the ports given "
        "here, each further one on the next free ports above; `tandem status` lists them. Limits apply to each router. "
        "More may join from other machines (`python -m router --join`); 0: only those.",
    )
    http_host: str = Field("127.0.0.1", description="Address of the HTTP port.")
    http_port: Port = Field(8000, description="OpenAI-compatible API, metrics and dashboard; 0: any free port.")
    grpc_host: str = Field("127.0.0.1", description="Address of the gRPC port.")
    grpc_port: Port = Field(50051, description="gRPC API; 0: any free port.")
    tls: EdgeTlsSpec | None = Field(None, description="TLS 1.2 or newer on both ports; unset: plain text.")
    max_queued_requests: PositiveCount = Field(
        256, description="Requests in the queue, beyond which others are refused."
    )
    queue_timeout_s: Annotated[float, Field(gt=0)] = Field(60.0, description="Longest time in the queue.")
    max_prefill_tokens_in_flight: Annotated[int, Field(ge=1)] = Field(
        2048, description="Prompt tokens in flight to one prefill worker, beyond which requests wait in the router."
    )
    classes: Annotated[tuple[ClassSpec, ...], Field(min_length=1, max_length=16)] = Field(
        (
            ClassSpec(name="interactive", ttft_slo_s=30.0),
            ClassSpec(name="batch", batch=True, queue_timeout_s=600.0),
        ),
        description="Priority classes. Requests that name none get the first.",
    )
    policy: PolicyName = Field(
        PolicyName.EXPECTED_TTFT,
        description="Policy that chooses workers; all but the default are baselines for comparison.",
    )
    disaggregation: Disaggregation = Field(
        Disaggregation.AUTO, description="auto: prefill on the decode worker if the router predicts a gain."
    )
    local_prefill_max_tokens: Annotated[int, Field(ge=0)] = Field(
        32, description="auto: prompts with at most this many uncached tokens always prefill on the decode worker."
    )
    local_prefill_busy_max_tokens: Annotated[int, Field(ge=0)] = Field(
        256,
        description="auto: on a predicted gain, at most this many prompt tokens at a time prefill on a decode worker "
        "that is decoding other requests; 0: none. Workers with engine.longest_step_s take up to "
        "max_prefill_tokens_in_flight.",
    )
    max_migrations: Annotated[int, Field(ge=0)] = Field(
        3, description="Migrations of one request after a lost worker or a failed handoff, before it fails."
    )
    worker_stall_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        5.0,
        description="A busy worker without progress for this time (longer during a prefill) gets no new requests, "
        "and its running requests migrate if another worker can take them.",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins of web pages whose scripts may call the HTTP API, such as https://chat.example.org; "
        "'*': any.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(4 << 20, description="Largest request body.")
    max_connections: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        8192, description="Connections on each of the HTTP and gRPC ports; further ones are refused."
    )
    client_timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30.0,
        description="The router closes a connection whose client takes this long to send the rest of a request or to "
        "read its response.",
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        3.0, description="On shutdown the router refuses new requests and waits this long for running ones."
    )
    keep_alive_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        75.0, description="An idle HTTP connection is closed after this time."
    )
    record: str | None = Field(
        None,
        min_length=1,
        description="Folder for recordings of the router's latest decisions (at most 128 MiB), which `tandem replay` "
        "reads. Unset: no recording.",
    )
    record_text: bool = Field(False, description="Record token ids and text as well.")
    dashboard: bool = Field(True, description="Serve the web dashboard at `/dashboard` on the HTTP port.")
    index_memory_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = Field(
        64 << 20,
        description="Memory of the prefix index; 20 bytes per cached block of the cluster are enough. Blocks that do "
        "not fit give no cache hits (metric `tandem_index_lost_blocks_total`).",
    )
    idempotency: IdempotencySpec = IdempotencySpec()

    @model_validator(mode="after")
    def _classes_differ(self) -> RouterSpec:
        names = [each.name for each in self.classes]
        if len(set(names)) != len(names):
            raise ValueError(f"classes: expected different names, got {names}")
        return self

    @model_validator(mode="after")
    def _text_is_of_recordings(self) -> RouterSpec:
        if self.record_text and self.record is None:
            raise ValueError("record_text: expected false without record, got true: set record, or remove it")
        return self
