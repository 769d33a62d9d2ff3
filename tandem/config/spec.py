"""Tandem's configuration schema, shared by the YAML file, the environment, the command line and the Helm values.

A spec is frozen: `cluster/spec/loader.py` reads and validates it once, resolves it before anything is built, and
nothing changes it afterwards. The defaults are what `tandem up` runs.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from tandem.config.auth import STDOUT, AuthSpec, is_loopback
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.frozen import Frozen
from tandem.config.observability import LogLevel, LogLevels, LogTarget, ObservabilitySpec

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0, le=4096)]
PositiveCount = Annotated[int, Field(ge=1, le=4096)]

DEMO_MODEL = "smollm2-135m"
NODE_GROUP_LABEL = "tandem/node-group"
_CPU_POOL_BYTES = 512 << 20


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class EngineSpec(Frozen):
    """Settings of one worker's engine. Device `cpu` works on every machine."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = Field(
        "cpu",
        description="Device of a rank. cuda: the controller or Ray chooses a GPU for each rank. cuda:N: the GPU with "
        "this ordinal, for workers of one rank without Ray.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Dtype of activations.")
    weights: Literal["dense", "int8", "int4", "fp8"] = Field(
        "dense",
        description="Format of the projections. dense: `dtype`. int8: one scale per output. int4 (CPU, float32): a "
        "scale and a minimum per 32 inputs, output head in int8. fp8 (GPU, half precision): e4m3, scaled like int8. On "
        "a GPU, int8 and fp8 also quantise inputs, and keep the output head in `dtype`.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="Format of the KV cache. auto: `dtype`. int8 (CPU, float32): one scale per token and head. fp8: "
        "e4m3 without scales, values clipped to ±448.",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="CPU kernels in float32. native: Tandem's, compiled at first use. torch: torch's own."
    )
    batch_invariant: bool = Field(
        False, description="Compute bit-identical logits for a request alone and in any batch (CPU, float32)."
    )
    threads_per_rank: PositiveCount = Field(1, description="CPU threads of each rank for tensor work.")
    block_tokens: Literal[8, 16, 32, 64, 128] = Field(16, description="Tokens per KV block.")
    kv_blocks: Annotated[int, Field(ge=8)] | None = Field(
        None, description="KV blocks of each rank's pool; unset: as many as kv_memory_bytes holds."
    )
    kv_memory_bytes: Annotated[int, Field(ge=1 << 20)] | None = Field(
        None,
        description="Memory of each rank's KV pool, unless kv_blocks is set. Unset: 512 MiB on a CPU; on a GPU what "
        "device_share leaves after weights, activations and work space.",
    )
    device_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Share of the device's memory that a rank may use; several ranks share a GPU."
    )
    host_kv_memory_bytes: Annotated[int, Field(ge=0)] = Field(
        0, description="Host memory of each rank for KV blocks evicted from its pool; 0: none."
    )
    max_running_requests: PositiveCount = Field(64, description="Requests that a worker runs at a time.")
    max_step_tokens: Annotated[int, Field(ge=16, le=1 << 20)] = Field(
        512, description="Token budget of one engine step: decode tokens first, then prefill chunks."
    )
    speculation: Literal["none", "lookup"] = Field(
        "none",
        description="Tokens that are proposed and verified in the same step, where that pays. lookup: those that "
        "followed the last ones when they came before in prompt or answer.",
    )
    speculation_tokens: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Most tokens proposed for one request in a step."
    )
    max_model_tokens: Annotated[int, Field(ge=16)] | None = Field(
        None, description="Longest prompt plus output; unset: the model's context length."
    )
    peak_flops_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Dense peak of one rank's device in this dtype, the base of MFU; unset: measured at start."
    )
    peak_memory_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Peak of one rank's device, the base of MBU; unset: measured at start."
    )
    hang_timeout_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        60.0,
        description="A worker whose engine finishes neither a step nor a layer for this time is replaced, as if it had "
        "died.",
    )

    @model_validator(mode="after")
    def _share_is_of_a_gpu(self) -> EngineSpec:
        if self.device == "cpu" and self.device_share < 1:
            raise ValueError(
                "device_share: expected 1 with device cpu, whose memory is limited by kv_memory_bytes, got "
                f"{self.device_share}"
            )
        return self

    @property
    def pool_dtype(self) -> str:
        return {"auto": self.dtype, "int8": "int8", "fp8": "float8_e4m3"}[self.kv_dtype]

    @property
    def cpu_pool_bytes(self) -> int:
        """Memory of a KV pool on a CPU, unless kv_blocks is set."""
        return self.kv_memory_bytes or _CPU_POOL_BYTES

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def _optional(field: FieldInfo) -> Any:
    kind: Any = field.annotation
    for limit in field.metadata:
        kind = Annotated[kind, limit]
    return kind | None, Field(None, description=field.description)


class _SetKeys(Frozen):
    """Serialises only the keys that are set."""

    @model_serializer(mode="wrap")
    def _without_none(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialise(self).items() if value is not None}


if TYPE_CHECKING:

    class EngineOverrides(_SetKeys):
        """The keys of `EngineSpec`, all optional."""
else:
    EngineOverrides = create_model(
        "EngineOverrides",
        __base__=_SetKeys,
        __module__=__name__,
        __doc__="The keys of `models[].engine` for one role. An unset key has the value there.",
        **{name: _optional(field) for name, field in EngineSpec.model_fields.items()},
    )


NodeGroup = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class PoolSpec(Frozen):
    """All workers of one role."""

    workers: Count = Field(1, description="Number of workers of this role.")
    tp: PositiveCount = Field(1, description="Tensor-parallel ranks of each worker.")
    engine: EngineOverrides = EngineOverrides()
    node_groups: Annotated[tuple[NodeGroup, ...], Field(max_length=64)] = Field(
        (),
        description="Groups of Ray nodes that workers of this role may be on: values of the nodes' label "
        f"`{NODE_GROUP_LABEL}`. Empty: any node. Needs control.ray_address.",
    )


class Colocate(StrEnum):
    PREFER = "prefer"
    REQUIRE = "require"
    NO = "no"


class SamplingDefaults(StrEnum):
    CHECKPOINT = "checkpoint"
    OPENAI = "openai"


class SpecialTokens(StrEnum):
    TEXT = "text"
    TOKENS = "tokens"


class ModelSpec(Frozen):
    """One served base model and its two pools. With zero prefill workers the cluster is aggregated."""

    source: str = Field(DEMO_MODEL, description="Name of a pulled model, checkpoint folder, or GGUF file.")
    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,200}$")] | None = Field(
        None, description="Model name in the API; unset: the source's last path component."
    )
    prefill: PoolSpec = PoolSpec()
    decode: PoolSpec = PoolSpec()
    engine: EngineSpec = EngineSpec()
    colocate: Colocate = Field(
        Colocate.PREFER,
        description="Whether a worker is placed on a machine with workers of the other role, so that KV stays in its "
        "memory or on its NVLink. prefer: if one has room. require: it waits for such a machine, and a start fails "
        "without. no: anywhere.",
    )
    tool_parser: str = Field(
        "auto",
        description="Format of the model's tool calls (docs/tools.md has the names); auto: by its chat template; none: "
        "tools are refused.",
    )
    reasoning_parser: str = Field(
        "auto", description="Format of the model's reasoning; auto: by its chat template; none: it stays in the text."
    )
    sampling_defaults: SamplingDefaults = Field(
        SamplingDefaults.CHECKPOINT,
        description="Sampling of requests that say nothing about it. checkpoint: as generation_config.json says, and "
        "otherwise OpenAI's; openai: temperature 1, top_p 1, no top_k.",
    )
    special_tokens_in_messages: SpecialTokens = Field(
        SpecialTokens.TEXT,
        description="What a message means that spells out a special token such as <|im_start|>. text: the characters; "
        "tokens: the token, so that a message can begin a turn of its own.",
    )

    @model_validator(mode="after")
    def _source_can_be_read(self) -> ModelSpec:
        if "://" in self.source:
            raise ValueError(
                f"source: expected the name of a pulled model or of one on the hub, a folder or a .gguf file, got "
                f"{self.source}: Tandem reads from no such store; copy the model to a folder"
            )
        return self

    @model_validator(mode="after")
    def _needs_decode(self) -> ModelSpec:
        if self.decode.workers < 1:
            raise ValueError("decode.workers: expected at least 1 (zero prefill workers make the cluster aggregated)")
        return self

    @model_validator(mode="after")
    def _engines_are_valid(self) -> ModelSpec:
        for role in Role:
            try:
                self.engine_of(role)
            except ValidationError as error:
                (first, *_) = error.errors()
                raise ValueError(f"{role}.engine: {first['msg'].removeprefix('Value error, ')}") from None
        return self

    @model_validator(mode="after")
    def _machines_can_be_shared(self) -> ModelSpec:
        prefill, decode = self.prefill, self.decode
        if self.colocate is not Colocate.REQUIRE:
            return self
        if not prefill.workers:
            raise ValueError("colocate: expected prefer or no with prefill.workers 0: there is no other role")
        if prefill.node_groups and decode.node_groups and not {*prefill.node_groups} & {*decode.node_groups}:
            raise ValueError(
                "colocate: expected prefer or no, because prefill.node_groups and decode.node_groups have no group in "
                "common, got require"
            )
        return self

    @model_validator(mode="after")
    def _a_pinned_gpu_holds_one_rank(self) -> ModelSpec:
        for role in Role:
            device, tp = self.engine_of(role).device, self.pool(role).tp
            if ":" in device and tp > 1:
                raise ValueError(
                    f"{self.engine_field(role, 'device')}: expected cuda for workers of {tp} ranks ({role}.tp), which "
                    f"need {tp} GPUs, got {device}"
                )
        return self

    def pool(self, role: Role) -> PoolSpec:
        return self.prefill if role is Role.PREFILL else self.decode

    def engine_of(self, role: Role) -> EngineSpec:
        """The role's engine: `engine`, and on top of it what the role's pool sets."""
        return EngineSpec(**(self.engine.model_dump() | self.pool(role).engine.model_dump()))

    def engine_field(self, role: Role, name: str) -> str:
        """The dotted field that sets `name` for the role: `prefill.engine.dtype`, or `engine.dtype`."""
        return f"{role}.engine.{name}" if getattr(self.pool(role).engine, name) is not None else f"engine.{name}"

    @property
    def can_change_roles(self) -> bool:
        """Whether a worker of one role can take the other, at least on some nodes: both have the same width and
        engine."""
        same_engine = self.engine_of(Role.PREFILL) == self.engine_of(Role.DECODE)
        prefill, decode = self.prefill, self.decode
        groups = not prefill.node_groups or not decode.node_groups or {*prefill.node_groups} & {*decode.node_groups}
        return same_engine and prefill.tp == decode.tp and bool(groups)

    def roles_on(self, node_group: str) -> frozenset[Role]:
        """Those that a worker on a node of this group may have."""
        return frozenset(role for role in Role if node_group in (self.pool(role).node_groups or (node_group,)))

    @property
    def served_name(self) -> str:
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


class TransportKind(StrEnum):
    AUTO = "auto"
    MAPPED = "mapped"
    NCCL = "nccl"
    PROCESS_GROUP = "process_group"  # gloo
    TCP = "tcp"
    NIXL = "nixl"


class TlsSpec(Frozen):
    """PEM files, at the same paths on every host. Both sides of a connection present `cert`, which `ca` signed.

    `{role}` in a path stands for the role of the process that reads it: controller, router, worker or admin.
    """

    cert: Annotated[str, Field(min_length=1, description="Certificate.")]
    key: Annotated[str, Field(min_length=1, description="Not encrypted.")]
    ca: Annotated[
        str, Field(min_length=1, description="A CA of this cluster alone, because host names are not verified.")
    ]

    def of(self, role: str) -> TlsSpec:
        return TlsSpec(**{name: path.replace("{role}", role) for name, path in self.model_dump().items()})


class EdgeTlsSpec(Frozen):
    """PEM files of the client-facing ports, HTTP and gRPC. Reread when they change."""

    cert: Annotated[str, Field(min_length=1, description="With the intermediate certificates.")]
    key: Annotated[str, Field(min_length=1, description="Not encrypted.")]
    client_ca: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="CA that must have signed the client's certificate; unset: clients need none."
    )


class SecuritySpec(Frozen):
    auth: AuthSpec = AuthSpec()
    tls: TlsSpec | None = Field(
        None,
        description="Mutual TLS on every internal TCP port (docs/security.md): router to worker, KV plane, admin, Ray. "
        "`tandem certs init` creates the files.",
    )
    allow_plaintext: bool = Field(
        False,
        description="Without tls, internal ports must be on loopback. true: control.admin_host and transfer.bind_host "
        "may be other addresses, and everyone who reaches them can control the cluster and read its traffic.",
    )


class WireDtype(StrEnum):
    POOL = "pool"
    INT8 = "int8"


class TransferSpec(Frozen):
    transport: TransportKind = Field(
        TransportKind.AUTO,
        description="auto: the fastest that works between two workers: mapped (shared memory or CUDA IPC, within a "
        "host), nixl (RDMA, if installed), nccl (between GPUs), tcp. With TLS: mapped or tcp. process_group is gloo.",
    )
    tls: TlsSpec | None = Field(
        None, description="Mutual TLS 1.3 on every TCP connection of the KV plane; unset: security.tls."
    )
    digests: bool = Field(True, description="Send a digest with every KV piece, which the receiver checks.")
    wire_dtype: WireDtype = Field(
        WireDtype.POOL,
        description="int8: process_group and tcp links send KV as int8 with one scale per token and head; "
        "outputs may differ from those of a full-precision transfer.",
    )
    ticket_ttl_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30.0, description="A KV lease without progress ends after this time."
    )
    bind_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1",
        description="Address on which workers listen. auto: the address from which the worker's host reaches the "
        "controller, different on each host.",
    )

    @model_validator(mode="after")
    def _tls_covers_transport(self) -> TransferSpec:
        if self.tls is not None and not self.can_encrypt:
            raise ValueError(
                f"transfer.transport: {self.transport} cannot be encrypted; with transfer.tls, expected auto, mapped "
                "or tcp"
            )
        return self

    @property
    def can_encrypt(self) -> bool:
        return self.transport in (TransportKind.AUTO, TransportKind.MAPPED, TransportKind.TCP)


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
        "that is decoding other requests.",
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


class RedisSpec(Frozen):
    mode: Literal["embedded", "external", "none"] = Field(
        "embedded", description="embedded: start a Valkey server; external: use the one at url; none: run without."
    )
    url: str | None = Field(
        None,
        description="external: redis://, rediss:// (TLS; ?ssl_ca_certs=FILE) or unix:// URL; redis+sentinel://HOST:PORT,"
        "HOST:PORT/SERVICE or redis+cluster://HOST:PORT,HOST:PORT.",
    )

    @model_validator(mode="after")
    def _url_matches_mode(self) -> RedisSpec:
        if (self.mode == "external") != (self.url is not None):
            raise ValueError("redis.url: expected if and only if redis.mode is 'external'")
        return self


class ControlSpec(Frozen):
    backend: Literal["ray", "subprocess"] = Field(
        "ray", description="ray: place workers on a Ray cluster; subprocess: start them on this machine."
    )
    ray_address: str | None = Field(
        None, description="Address of a running Ray cluster; unset: start one on this machine."
    )
    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=64)] | None = Field(
        None,
        description="Ordinals of this machine's GPUs that workers may use, as CUDA_VISIBLE_DEVICES leaves them; unset: "
        "all. Not with ray_address: there each node has its own CUDA_VISIBLE_DEVICES.",
    )
    admin_host: str = Field("127.0.0.1", description="Address of the controller's admin port.")
    admin_port: Port = Field(50052, description="Admin API for `tandem status` and similar commands; 0: any free port.")
    advertised_address: Annotated[str, Field(pattern=r"^.+:[0-9]{1,5}$")] | None = Field(
        None,
        description="Address (HOST:PORT) at which workers and routers find the controller, if not at the admin port: "
        "one that stays when the controller moves to another machine.",
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="Time within which a worker must be ready."
    )
    drain_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0,
        description="A worker that is removed or restarted waits this long for its requests to end or move. "
        "The remaining requests then migrate, as after the loss of a worker.",
    )
    when_stopped: Literal["end", "leave"] = Field(
        "end",
        description="What a signal to `tandem up` means for workers. end: they end too. leave: they serve on, with "
        "routers that joined, and the next controller takes them over. leave needs ray_address: a local Ray ends with "
        "tandem up.",
    )

    @model_validator(mode="after")
    def _workers_can_be_left(self) -> ControlSpec:
        if self.when_stopped == "leave" and (self.backend != "ray" or self.ray_address is None):
            raise ValueError(
                "control.when_stopped: expected end without control.ray_address: workers end with `tandem up` then, "
                "so it cannot leave them"
            )
        return self

    @model_validator(mode="after")
    def _devices_are_of_this_machine(self) -> ControlSpec:
        if self.devices is None:
            return self
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"control.devices: expected different ordinals, got {list(self.devices)}")
        if self.ray_address is not None:
            raise ValueError(
                "control.devices: expected none with control.ray_address: set CUDA_VISIBLE_DEVICES for `ray start`"
            )
        return self


def _check_ray_device(model: ModelSpec, role: Role, engine: EngineSpec) -> None:
    """Ray chooses the GPUs. It may give two shares of one GPU to one worker, whose ranks need different ones."""
    if ":" in engine.device:
        raise ValueError(
            f"{model.engine_field(role, 'device')}: expected cuda with control.backend ray, which chooses the GPU, got "
            f"{engine.device}: use cuda, or control.backend subprocess"
        )
    if engine.on_gpu and model.pool(role).tp > 1 and engine.device_share <= 0.5:
        raise ValueError(
            f"{model.engine_field(role, 'device_share')}: expected more than 0.5 for workers of {model.pool(role).tp} "
            f"ranks ({role}.tp) with control.backend ray, which may place two smaller shares on one GPU, got "
            f"{engine.device_share:g}: raise it, or use control.backend subprocess or tp 1"
        )


class ClusterSpec(Frozen):
    """A whole cluster."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] = Field("tandem", description="Name of the cluster.")
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)] = (ModelSpec(),)
    transfer: TransferSpec = TransferSpec()
    router: RouterSpec = RouterSpec()
    redis: RedisSpec = RedisSpec()
    control: ControlSpec = ControlSpec()
    autoscaler: AutoscalerSpec = AutoscalerSpec()
    observability: ObservabilitySpec = ObservabilitySpec()
    security: SecuritySpec = SecuritySpec()
    log_level: LogLevel = Field("info", description="Log level of all processes.")
    log_levels: LogLevels = LogLevels()

    def log_level_of(self, part: Literal["controller", "router", "worker"]) -> LogLevel:
        own: LogLevel | None = getattr(self.log_levels, part)
        return own or self.log_level

    @property
    def of_routers(self) -> tuple[RouterSpec, LogLevel]:
        """What routers that run can change to."""
        return self.router, self.log_level_of("router")

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterSpec:
        names = [model.served_name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models: expected different names, got {names}")
        return self

    @model_validator(mode="after")
    def _devices_can_be_assigned(self) -> ClusterSpec:
        pools = [(model, role, model.engine_of(role)) for model in self.models for role in Role]
        if self.control.devices is not None and not any(engine.on_gpu for _, _, engine in pools):
            raise ValueError("control.devices: expected together with engine.device cuda; all workers run on the CPU")
        if self.control.backend == "ray":
            for model, role, engine in pools:
                _check_ray_device(model, role, engine)
        return self

    @model_validator(mode="after")
    def _nodes_have_groups(self) -> ClusterSpec:
        for model, role in product(self.models, Role):
            on_nodes = self.control.backend == "ray" and self.control.ray_address is not None
            if model.pool(role).node_groups and not on_nodes:
                raise ValueError(
                    f"models: {model.served_name}: {role}.node_groups: expected none without control.backend ray and "
                    "control.ray_address: all workers are on this machine"
                )
        return self

    @model_validator(mode="after")
    def _tls_covers_all(self) -> ClusterSpec:
        if self.security.tls is None:
            return self
        if not self.transfer.can_encrypt:
            raise ValueError(
                f"transfer.transport: {self.transfer.transport} cannot be encrypted; with security.tls, expected auto, "
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
                "autoscaler.enabled: expected a class in router.classes with batch false and with ttft_slo_s or "
                "tpot_slo_s, the objectives of the autoscaler"
            )
        return self

    @model_validator(mode="after")
    def _internal_ports_are_closed(self) -> ClusterSpec:
        if self.security.tls is not None or self.security.allow_plaintext:
            return self
        hosts = {"control.admin_host": self.control.admin_host, "transfer.bind_host": self.transfer.bind_host}
        for field, host in hosts.items():
            if not is_loopback(host):
                raise ValueError(
                    f"{field}: {host} is not loopback, and internal ports are not encrypted: set security.tls "
                    "(`tandem certs init` makes the files), or `security.allow_plaintext: true` in a network where you "
                    "trust everyone"
                )
        return self

    @model_validator(mode="after")
    def _audit_log_reaches_stdout(self) -> ClusterSpec:
        if self.security.auth.audit_log == STDOUT and self.observability.logs.target is not LogTarget.STDOUT:
            raise ValueError(
                "security.auth.audit_log: expected a file, or stdout together with `observability.logs.target: "
                "stdout`: otherwise the standard output of a router is a file of bounded size"
            )
        return self

    @model_validator(mode="after")
    def _strangers_are_asked(self) -> ClusterSpec:
        router = self.router
        self.security.auth.check_hosts({"router.http_host": router.http_host, "router.grpc_host": router.grpc_host})
        return self
