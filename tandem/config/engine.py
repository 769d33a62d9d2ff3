"""Settings of one worker's engine, and the same for one role, where each may be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, create_model, model_serializer, model_validator
from pydantic.fields import FieldInfo

from tandem.config.frozen import Frozen, PositiveCount

_CPU_POOL_BYTES = 512 << 20
_WINDOW_S = 0.1
MAX_LONGEST_STEP_S = 60
# Unless engine.vllm has max_lora_rank, max_loras and max_cpu_loras. The first is vLLM's own default.
_ADAPTER_RANK, _ADAPTERS_IN_BATCH, _ADAPTERS_KEPT = 16, 8, 32
_OF_IMAGES = ("media_io_kwargs", "mm_processor_kwargs")


# What vLLM has under names of its own, or not at all.
_OF_TANDEM = (
    "weights",
    "kernels",
    "batch_invariant",
    "host_kv_memory_bytes",
    "longest_step_s",
    "batching",
    "speculation",
)


class EngineSpec(Frozen):
    """Settings of one worker's engine. Device `cpu` works on every machine."""

    kind: Literal["tandem", "vllm"] = Field(
        "tandem", description="tandem: Tandem's own. vllm: vLLM, of the extra tandem-serve[vllm] (docs/engines.md)."
    )
    vllm: dict[str, JsonValue] = Field(
        {},
        description="vLLM's own settings, as attention_backend, with underscores. A name that the installed version "
        "does not know, and what Tandem sets itself, is refused at start.",
    )
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
        "e4m3 without scales, values clipped to ±448. vLLM takes auto and fp8, with the scales of the checkpoint.",
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
    longest_step_s: Annotated[float, Field(gt=0, le=MAX_LONGEST_STEP_S, allow_inf_nan=False)] | None = Field(
        None,
        description="How long a step may take that computes prompts while answers go on: it gets as many prompt tokens "
        "as fit, at least 16. For workers that decode, your objective of the time per token. Unset: max_step_tokens "
        "alone limits it.",
    )
    batching: Literal["continuous", "static", "dynamic"] = Field(
        "continuous",
        description="continuous: a request starts as soon as there is room. static, dynamic: baselines to measure "
        "against (docs/batching.md). Requests are collected, and a batch runs until its last answer has ended.",
    )
    batching_window_s: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None,
        description="When a static or dynamic batch begins that is not full. static: no request came for this time. "
        f"dynamic: its first one has waited for it. Unset: {_WINDOW_S}.",
    )
    speculation: Literal["none", "auto", "lookup", "lookahead", "draft", "early_exit", "medusa", "eagle3"] = Field(
        "none",
        description="Tokens that are proposed and verified in the same step, where that pays. lookup: those that "
        "followed the last ones when they came before in prompt or answer. auto: lookup that rests while nothing pays. "
        "lookahead: those that the model chose after wrong ones. draft, early_exit, medusa, eagle3: those of a "
        "smaller model, of the model's first layers, of heads on its last hidden state, and of a layer that reads its "
        "hidden states.",
    )
    speculation_adaptive: bool = Field(
        True, description="Propose as many tokens as pay. false: speculation_tokens for each request, for measuring."
    )
    speculation_model: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Name of a pulled draft model or its folder; folder of Medusa heads, of an EAGLE-3 head, or of a "
        "trained early exit (optional).",
    )
    speculation_weights: Literal["dense", "int8", "int4", "fp8"] | None = Field(
        None,
        description="Format of the draft model's weights; unset: `weights`. Without a speculation_model, draft is the "
        "model itself with such weights.",
    )
    speculation_layers: PositiveCount | None = Field(
        None, description="After how many layers early_exit drafts; unset: as its speculation_model was trained."
    )
    speculation_tokens: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Most tokens proposed for one request in a step."
    )
    speculation_branches: Annotated[int, Field(ge=0, le=16)] = Field(
        0,
        description="With medusa, most branches of a tree: tokens less likely than the drafted ones, and those after "
        "them, computed beside these where that pays.",
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
    def _settings_are_of_this_engine(self) -> EngineSpec:
        if self.kind == "tandem" and self.vllm:
            raise ValueError(f"vllm: expected none with kind tandem, got {', '.join(sorted(self.vllm))}")
        if self.kind == "vllm":
            if self.on_gpu:
                raise ValueError(f"device: expected cpu with kind vllm, which no GPU has run yet, got {self.device}")
            for name in _OF_TANDEM:
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}: expected none with kind vllm, got {value}: set what vLLM has for it in `vllm`"
                    )
            if self.kv_dtype == "int8":
                raise ValueError("kv_dtype: expected auto or fp8 with kind vllm, got int8")
            if self.block_tokens % 32:
                raise ValueError(f"block_tokens: expected 32, 64 or 128 with kind vllm, got {self.block_tokens}")
        return self

    @model_validator(mode="after")
    def _share_is_of_a_gpu(self) -> EngineSpec:
        if self.device == "cpu" and self.device_share < 1:
            raise ValueError(
                "device_share: expected 1 with device cpu, whose memory is limited by kv_memory_bytes, got "
                f"{self.device_share}"
            )
        return self

    @model_validator(mode="after")
    def _speculation_has_what_it_needs(self) -> EngineSpec:
        kind, model, layers = self.speculation, self.speculation_model, self.speculation_layers
        if kind == "none" and not self.speculation_adaptive:
            raise ValueError("speculation_adaptive: expected true with speculation none, got false")
        if kind == "none" and self.speculation_tokens != type(self).model_fields["speculation_tokens"].default:
            raise ValueError(f"speculation_tokens: expected none with speculation none, got {self.speculation_tokens}")
        if kind != "draft" and self.speculation_weights is not None:
            raise ValueError(
                f"speculation_weights: expected none with speculation {kind}, got {self.speculation_weights}"
            )
        if model is None and (kind in {"medusa", "eagle3"} or (kind == "draft" and self.speculation_weights is None)):
            raise ValueError(f"speculation_model: expected a folder or name with speculation {kind}, got none")
        if kind == "draft" and model is None and self.speculation_weights == self.weights:
            raise ValueError(
                f"speculation_weights: expected another format than weights, got {self.weights} for both: the model "
                "would draft itself"
            )
        if kind not in {"draft", "medusa", "early_exit", "eagle3"} and model is not None:
            raise ValueError(f"speculation_model: expected none with speculation {kind}, got {model}")
        if kind == "early_exit" and model is None and layers is None:
            raise ValueError("speculation_layers: expected a number of layers with speculation early_exit, got none")
        tree = (1 + self.speculation_branches) * (1 + self.speculation_tokens)
        if self.speculation_branches and kind != "medusa":
            raise ValueError(
                f"speculation_branches: expected 0 with speculation {kind}, got {self.speculation_branches}"
            )
        if self.speculation_branches and tree > self.max_step_tokens:
            raise ValueError(
                f"speculation_branches: expected a tree of at most max_step_tokens ({self.max_step_tokens}), got "
                f"{tree} tokens, (1 + speculation_branches) x (1 + speculation_tokens): lower one of them, or raise "
                "max_step_tokens"
            )
        if kind != "early_exit" and layers is not None:
            raise ValueError(f"speculation_layers: expected none with speculation {kind}, got {layers}")
        return self

    @model_validator(mode="after")
    def _window_is_of_batches(self) -> EngineSpec:
        if self.batching == "continuous" and self.batching_window_s is not None:
            raise ValueError(
                "batching_window_s: expected none with batching continuous, which collects no requests, got "
                f"{self.batching_window_s}: remove it, or set batching to static or dynamic"
            )
        return self

    @property
    def without_speculation(self) -> EngineSpec:
        fields = {
            name: each.default for name, each in type(self).model_fields.items() if name.startswith("speculation")
        }
        return self.model_copy(update=fields)

    @property
    def collecting_s(self) -> float:
        """The window of static and dynamic batching."""
        return _WINDOW_S if self.batching_window_s is None else self.batching_window_s

    @property
    def pool_dtype(self) -> str:
        return {"auto": self.dtype, "int8": "int8", "fp8": "float8_e4m3"}[self.kv_dtype]

    @property
    def drafter_layers(self) -> int:
        """Layers of KV that a drafter adds to the model's own."""
        return int(self.speculation == "eagle3")

    @property
    def cpu_pool_bytes(self) -> int:
        """Memory of a KV pool on a CPU, unless kv_blocks is set."""
        return self.kv_memory_bytes or _CPU_POOL_BYTES

    @property
    def max_adapter_rank(self) -> int:
        """The largest rank of an adapter that its workers make room for."""
        return self._vllm_count("max_lora_rank", _ADAPTER_RANK)

    @property
    def max_adapters_in_batch(self) -> int:
        """The adapters that run at a time, for each of which its workers make room."""
        return self._vllm_count("max_loras", _ADAPTERS_IN_BATCH)

    @property
    def max_adapters_kept(self) -> int:
        """The adapters that each rank keeps in host memory."""
        return self._vllm_count("max_cpu_loras", max(_ADAPTERS_KEPT, self.max_adapters_in_batch))

    @property
    def image_settings(self) -> dict[str, JsonValue]:
        """Those of vLLM that change what an image becomes, as far as they are set."""
        return {name: self.vllm[name] for name in _OF_IMAGES if self.vllm.get(name)}

    def _vllm_count(self, name: str, default: int) -> int:
        given = self.vllm.get(name)
        return given if isinstance(given, int) else default

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
