"""Settings of a served model and its two pools of workers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from tandem.config.engine import EngineOverrides, EngineSpec
from tandem.config.frozen import Count, Frozen, PositiveCount

DEMO_MODEL = "smollm2-135m"
NODE_GROUP_LABEL = "tandem/node-group"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


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


ModelName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,200}$")]


class AdapterSpec(Frozen):
    """A LoRA adapter of a model, served under a name of its own (docs/engines.md)."""

    name: ModelName = Field(description="Its name in the API, as a model's.")
    source: Annotated[str, Field(min_length=1)] = Field(
        description="Its folder, with adapter_config.json and adapter_model.safetensors, as PEFT writes them."
    )


class ModelSpec(Frozen):
    """One served base model and its two pools. With zero prefill workers the cluster is aggregated."""

    source: str = Field(DEMO_MODEL, description="Name of a pulled model, checkpoint folder, or GGUF file.")
    name: ModelName | None = Field(None, description="Model name in the API; unset: the source's last path component.")
    prefill: PoolSpec = PoolSpec()
    decode: PoolSpec = PoolSpec()
    engine: EngineSpec = EngineSpec()
    adapters: Annotated[tuple[AdapterSpec, ...], Field(max_length=1024)] = Field(
        (), description="LoRA adapters, each served as a model of its own name. Needs engine.kind vllm."
    )
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
    def _engines_take_adapters(self) -> ModelSpec:
        for role in Role:
            if self.adapters and (kind := self.engine_of(role).kind) != "vllm":
                raise ValueError(
                    f"adapters: expected none with {self.engine_field(role, 'kind')} {kind}: set it to vllm"
                )
            given, field = self.engine_of(role).vllm, self.engine_field(role, "vllm")
            if self.adapters and given.get("enable_lora", True) is not True:
                raise ValueError(f"{field}.enable_lora: expected true with adapters, got {given['enable_lora']}")
            for name in ("max_lora_rank", "max_loras", "max_cpu_loras"):
                if type(given.get(name, 1)) is not int:
                    raise ValueError(f"{field}.{name}: expected an integer, got {given[name]!r}")
        return self

    @model_validator(mode="after")
    def _roles_read_images_alike(self) -> ModelSpec:
        prefill, decode = (self.engine_of(role).image_settings for role in (Role.PREFILL, Role.DECODE))
        for name in sorted({*prefill, *decode}):
            if (wanted := prefill.get(name)) != (got := decode.get(name)):
                raise ValueError(
                    f"engine.vllm.{name}: expected the same for both roles, got {wanted} for prefill and {got} for "
                    "decode: set it in the model's engine alone"
                )
        return self

    @model_validator(mode="after")
    def _batches_are_of_one_engine(self) -> ModelSpec:
        if self.prefill.workers and (unfit := self.no_prefill_workers) is not None:
            raise ValueError(unfit)
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

    @property
    def no_prefill_workers(self) -> str | None:
        """Why the model can have no prefill workers. None: it can."""
        for role in Role:
            if (batching := self.engine_of(role).batching) != "continuous":
                return (
                    f"{self.engine_field(role, 'batching')}: expected continuous with prefill workers, got {batching}: "
                    "a batch has the prompts and the answers of one engine. Set prefill.workers: 0"
                )
        return None

    def takes_adapters(self, role: Role) -> bool:
        """Whether the role's workers start so that they can load adapters."""
        engine = self.engine_of(role)
        return engine.kind == "vllm" and bool(self.adapters or engine.vllm.get("enable_lora"))

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
    def names(self) -> tuple[str, ...]:
        """Under which it and its adapters are served."""
        return self.served_name, *(each.name for each in self.adapters)

    @property
    def served_name(self) -> str:
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
