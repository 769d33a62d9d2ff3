"""The one schema of Tandem's configuration: YAML file, environment, command line and Helm values are all this.

Frozen, validated once, resolved before anything is built, never changed afterwards. `cluster/spec/loader.py` reads
it; everything below receives it. Defaults are what `tandem up` runs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.config.auth import AuthSpec
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.frozen import Frozen
from tandem.config.observability import ObservabilitySpec

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0, le=4096)]
PositiveCount = Annotated[int, Field(ge=1, le=4096)]

DEMO_MODEL = "smollm2-135m"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class PoolSpec(Frozen):
    """All workers of one role."""

    workers: Count = 1
    tp: PositiveCount = Field(1, description="Tensor-parallel ranks of each worker.")


class EngineSpec(Frozen):
    """What one worker's engine may use. The device is a parameter everywhere; `cpu` runs everywhere."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    weights: Literal["dense", "int8", "int4", "fp8"] = Field(
        "dense",
        description="Projections in `dtype`; in int8 with one scale for each output; on a CPU in float32 also in int4 "
        "with a scale and a least value for each 32 inputs, and the vocabulary's matrix in int8; on a GPU in half "
        "precision also in fp8 (e4m3) as in int8, where both quantise inputs too and leave the vocabulary's matrix.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="Of the KV cache: `dtype`; int8 with a scale for each token and head (CPU, float32); or fp8 (e4m3) "
        "without one, ±448 for what is larger.",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="On CPU in float32: native ones, built with the C compiler when first used, or torch's own."
    )
    batch_invariant: bool = Field(
        False, description="The same tokens alone and in any batch, to the last bit of every logit (CPU, float32)."
    )
    threads_per_rank: PositiveCount = Field(1, description="CPU threads of each rank's tensor work.")
    block_tokens: Literal[8, 16, 32, 64, 128] = 16
    kv_blocks: Annotated[int, Field(ge=8)] | None = Field(
        None, description="KV blocks of each rank's pool; unset: as many as kv_memory_bytes holds."
    )
    kv_memory_bytes: Annotated[int, Field(ge=1 << 20)] = 512 << 20
    host_kv_memory_bytes: Annotated[int, Field(ge=0)] = Field(
        0, description="Host memory of each rank for KV blocks that its pool has no room for any more; 0: none."
    )
    max_running_requests: PositiveCount = 64
    max_step_tokens: Annotated[int, Field(ge=16, le=1 << 20)] = Field(
        512, description="Token budget of one engine step: decode tokens first, then prefill chunks."
    )
    max_model_tokens: Annotated[int, Field(ge=16)] | None = Field(
        None, description="Longest prompt plus answer; unset: the model's own context."
    )
    peak_flops_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Of one rank's device, dense, in this dtype: MFU is a share of it; unset: measured at start."
    )
    peak_memory_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Of one rank's device: MBU is a share of it; unset: measured at start."
    )

    @property
    def pool_dtype(self) -> str:
        return {"auto": self.dtype, "int8": "int8", "fp8": "float8_e4m3"}[self.kv_dtype]


class ModelSpec(Frozen):
    """One served base model with its two pools. Zero prefill workers make it aggregated."""

    source: str = Field(DEMO_MODEL, description="A pulled model's name, a checkpoint folder, or a GGUF file.")
    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,200}$")] | None = Field(
        None, description="The name clients use; unset: the source's last path component."
    )
    prefill: PoolSpec = PoolSpec()
    decode: PoolSpec = PoolSpec()
    engine: EngineSpec = EngineSpec()

    @model_validator(mode="after")
    def _needs_decode(self) -> ModelSpec:
        if self.decode.workers < 1:
            raise ValueError("decode.workers: expected at least 1 (zero prefill workers make the cluster aggregated)")
        return self

    @property
    def served_name(self) -> str:
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


class TransportKind(StrEnum):
    AUTO = "auto"
    MAPPED = "mapped"
    PROCESS_GROUP = "process_group"
    TCP = "tcp"
    NIXL = "nixl"


class TlsSpec(Frozen):
    """PEM files, at the same paths on every host. Both sides of a connection show `cert`, signed by `ca`.

    `{role}` in a path stands for controller, router, worker or admin: whose process reads it.
    """

    cert: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1, description="Not encrypted.")]
    ca: Annotated[str, Field(min_length=1, description="One of this cluster's own: host names are not compared.")]

    def of(self, role: str) -> TlsSpec:
        return TlsSpec(**{name: path.replace("{role}", role) for name, path in self.model_dump().items()})


class EdgeTlsSpec(Frozen):
    """PEM files of the edge, HTTP and gRPC alike. Read again when they are renewed."""

    cert: Annotated[str, Field(min_length=1, description="With the certificates between it and the clients' root.")]
    key: Annotated[str, Field(min_length=1, description="Not encrypted.")]
    client_ca: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Clients must show a certificate that it signed; unset: they need none."
    )


class SecuritySpec(Frozen):
    auth: AuthSpec = AuthSpec()
    tls: TlsSpec | None = Field(
        None,
        description="Mutual TLS on every internal TCP port (docs/security.md): router to worker, KV plane, admin, Ray. "
        "`tandem certs init` makes the files.",
    )


class WireDtype(StrEnum):
    POOL = "pool"
    INT8 = "int8"


class TransferSpec(Frozen):
    transport: TransportKind = Field(
        TransportKind.AUTO, description="auto: mapped on one host; across hosts process_group, or tcp with tls."
    )
    tls: TlsSpec | None = Field(
        None, description="Mutual TLS 1.3 on every TCP connection of the KV plane; unset: security.tls."
    )
    digests: bool = True
    wire_dtype: WireDtype = Field(
        WireDtype.POOL,
        description="int8: process_group and tcp links carry KV as int8 with a scale for each token of each head; "
        "answers may differ from the pool's precision.",
    )
    ticket_ttl_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30.0, description="A lease without progress ends after this."
    )
    bind_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1",
        description="Where workers listen, on their own host. auto: at the address by which that host reaches the "
        "controller, so that every host has its own.",
    )

    @model_validator(mode="after")
    def _tls_covers_transport(self) -> TransferSpec:
        if self.tls is not None and not self.can_encrypt:
            raise ValueError(
                f"transfer.transport: {self.transport} cannot be encrypted: with transfer.tls, expected auto, mapped "
                "or tcp"
            )
        return self

    @property
    def can_encrypt(self) -> bool:
        return self.transport not in (TransportKind.PROCESS_GROUP, TransportKind.NIXL)


class Disaggregation(StrEnum):
    ALWAYS = "always"  # every request goes through a handoff while there is a prefill worker
    AUTO = "auto"  # prefilled on the decode worker where that is clearly sooner and spares those that decode
    NEVER = "never"


class PolicyName(StrEnum):
    """How workers are chosen (docs/routing.md). All but the first are baselines."""

    EXPECTED_TTFT = "expected_ttft"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    CACHE_ONLY = "cache_only"


class ClassSpec(Frozen):
    """One priority class of requests: clients name it in `x-tandem-priority`."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = Field(
        1.0, description="Its share of the prompt tokens dispatched while several classes wait."
    )
    ttft_slo_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Time to first token beyond which a request is refused at once; unset: it may wait."
    )
    tpot_slo_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Time per output token after the first that counts as goodput; nothing is refused for it."
    )
    queue_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Longest wait; unset: router.queue_timeout_s."
    )
    batch: bool = Field(False, description="Dispatched only while no request of another class waits.")


class RouterSpec(Frozen):
    replicas: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Routers, all alike and without a leader. The first listens on the ports given here, every "
        "further one on the next free ports above them; `tandem status` names them. Limits are each router's own.",
    )
    http_host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_host: str = "127.0.0.1"
    grpc_port: Port = 50051
    tls: EdgeTlsSpec | None = Field(None, description="TLS 1.2 or newer on both ports; unset: plain text.")
    max_queued_requests: PositiveCount = 256
    queue_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    max_prefill_tokens_in_flight: Annotated[int, Field(ge=1)] = Field(
        2048, description="Prompt tokens dispatched to one prefill worker before requests wait in the router."
    )
    classes: Annotated[tuple[ClassSpec, ...], Field(min_length=1, max_length=16)] = Field(
        (
            ClassSpec(name="interactive", ttft_slo_s=30.0),
            ClassSpec(name="batch", batch=True, queue_timeout_s=600.0),
        ),
        description="The first is that of requests that name none.",
    )
    policy: PolicyName = Field(
        PolicyName.EXPECTED_TTFT, description="How workers are chosen; the others are baselines to compare with."
    )
    disaggregation: Disaggregation = Field(
        Disaggregation.AUTO, description="auto: prefilled on the decode worker where the router predicts a gain."
    )
    local_prefill_max_tokens: Annotated[int, Field(ge=0)] = Field(
        32, description="auto: up to this many uncached tokens are always prefilled on the decode worker."
    )
    local_prefill_busy_max_tokens: Annotated[int, Field(ge=0)] = Field(
        256,
        description="auto: while others decode there, a predicted gain puts at most this many prompt tokens at a time "
        "on a decode worker.",
    )
    max_migrations: Annotated[int, Field(ge=0)] = Field(
        3, description="How often one request is continued elsewhere after a lost worker or a failed handoff."
    )
    worker_stall_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        5.0,
        description="A worker with work that shows no progress for so long (longer while it computes a prompt) is left "
        "out, and its requests go on elsewhere.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 << 20
    max_connections: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        8192, description="On the HTTP port, and as many on the gRPC port; further ones are refused."
    )
    client_timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30.0,
        description="A client that keeps the router waiting for the rest of a request, or that leaves its answer "
        "unread, is cut off after this.",
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        3.0, description="A router that is told to end refuses new requests and lets running ones go on for so long."
    )
    keep_alive_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        75.0, description="An HTTP connection without a request is closed after this."
    )
    record: str | None = Field(
        None,
        min_length=1,
        description="A folder in which the router keeps the last minutes of its decisions (at most 128 MiB), for "
        "`tandem replay`; unset: nothing is recorded.",
    )
    record_text: bool = Field(False, description="Recordings also hold token ids and text.")
    dashboard: bool = Field(True, description="Serve the web dashboard at `/dashboard` on the HTTP port.")
    index_memory_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = Field(
        64 << 20,
        description="Memory of the prefix index: 20 bytes for each cached block of the cluster are enough. Blocks "
        "beyond give no cache hits (metric `tandem_index_lost_blocks_total`).",
    )

    @model_validator(mode="after")
    def _classes_differ(self) -> RouterSpec:
        names = [each.name for each in self.classes]
        if len(set(names)) != len(names):
            raise ValueError(f"classes: expected different names, got {names}")
        return self


class RedisSpec(Frozen):
    mode: Literal["embedded", "external", "none"] = "embedded"
    url: str | None = Field(
        None,
        description="external: redis://, rediss:// (TLS; ?ssl_ca_certs=FILE) or unix:// URL; redis+sentinel://HOST:PORT,"
        "HOST:PORT/SERVICE or redis+cluster://HOST:PORT,HOST:PORT.",
    )

    @model_validator(mode="after")
    def _url_matches_mode(self) -> RedisSpec:
        if (self.mode == "external") != (self.url is not None):
            raise ValueError("redis.url: expected exactly when redis.mode is 'external'")
        return self


class ControlSpec(Frozen):
    backend: Literal["ray", "subprocess"] = "ray"
    ray_address: str | None = Field(None, description="An existing Ray cluster; unset: start one on this machine.")
    admin_host: str = "127.0.0.1"
    admin_port: Port = 50052
    start_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    drain_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0,
        description="A worker that is to leave or to start anew waits so long for its requests to end or to be moved. "
        "What is left then goes on elsewhere as after the loss of a worker.",
    )


class ClusterSpec(Frozen):
    """The whole cluster."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] = "tandem"
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)] = (ModelSpec(),)
    transfer: TransferSpec = TransferSpec()
    router: RouterSpec = RouterSpec()
    redis: RedisSpec = RedisSpec()
    control: ControlSpec = ControlSpec()
    autoscaler: AutoscalerSpec = AutoscalerSpec()
    observability: ObservabilitySpec = ObservabilitySpec()
    security: SecuritySpec = SecuritySpec()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterSpec:
        names = [model.served_name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models: expected different names, got {names}")
        return self

    @model_validator(mode="after")
    def _tls_covers_all(self) -> ClusterSpec:
        if self.security.tls is None:
            return self
        if not self.transfer.can_encrypt:
            raise ValueError(
                f"transfer.transport: {self.transfer.transport} cannot be encrypted: with security.tls, expected auto, "
                "mapped or tcp"
            )
        scheme = (self.redis.url or "unix:").partition(":")[0]
        if not scheme.startswith(("rediss", "unix")):
            raise ValueError(
                f"redis.url: with security.tls, expected rediss:// (or rediss+sentinel://, rediss+cluster://) or "
                f"unix://, got {scheme}://"
            )
        return self

    @model_validator(mode="after")
    def _autoscaler_has_objectives(self) -> ClusterSpec:
        classes = [each for each in self.router.classes if not each.batch]
        if self.autoscaler.enabled and not any(each.ttft_slo_s or each.tpot_slo_s for each in classes):
            raise ValueError(
                "autoscaler.enabled: expected a class in router.classes that is not batch and has ttft_slo_s or "
                "tpot_slo_s: these are what the autoscaler keeps"
            )
        return self

    @model_validator(mode="after")
    def _strangers_are_asked(self) -> ClusterSpec:
        router = self.router
        self.security.auth.check_hosts({"router.http_host": router.http_host, "router.grpc_host": router.grpc_host})
        return self
