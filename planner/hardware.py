"""A model on a device, or on one device for each role: the TP widths that fit, the capacity of a worker's KV pool, and
the cost of its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from planner.acceptance import Acceptance
from planner.calibration.file import Calibration
from planner.cost import ConstrainedCostModel, Corrections, CostModel, RooflineCostModel, StretchedCostModel
from planner.devices import DeviceSpec
from planner.models import PlannedModel, engine_bytes
from planner.profiled import Profiled
from planner.shared_host import HostCores
from planner.simulator.setup import PoolSetup, Setup
from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec, Role
from tandem.config.router import RouterSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.scheduler.batching import BatchRule

MASK_S_PER_ROW = 10e-6  # without a measurement: of `structured.mask_p50_us`, two threads
ROOFLINE_ERROR = 0.2  # of devices whose efficiencies are assumed: about that of H100 and H200 before theirs were fitted
_ROUNDING = 32  # a request's last block is half empty on average: 1.6 % if a block is 1/32 of the mean prompt


@dataclass(frozen=True, slots=True)
class Hardware:
    """`measured`: cost models by TP width that replace the roofline model. `host`: the host that all workers share;
    None: each has its own hardware. `constrained`: the share of requests whose answers a grammar constrains, each row
    of which takes `mask_s_per_row` more. `acceptance` None: no speculation. `calibration` None: as the cost model
    says. `profiled`: what the cost models were measured on, if they are of `tandem profile`. `notes`: on them."""

    model: PlannedModel
    device: DeviceSpec
    measured: Mapping[int, CostModel] = field(default_factory=dict)
    host: HostCores | None = None
    constrained: float = 0.0
    mask_s_per_row: float = MASK_S_PER_ROW
    acceptance: Acceptance | None = None
    stretch: float = 1.0  # how many times as long as the cost model says steps take
    calibration: Calibration | None = None
    profiled: Profiled | None = None
    notes: tuple[str, ...] = ()

    @property
    def corrections(self) -> Corrections:
        return Corrections() if self.calibration is None else self.calibration.corrections

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def is_mixed(self) -> bool:
        return False

    def of(self, role: Role) -> Hardware:
        """What workers of a role run on."""
        return self

    def stretched(self, factor: float) -> Hardware:
        return replace(self, stretch=factor)

    def cost(self, tp: int) -> CostModel:
        """Raises ConfigError when a measured model lacks this width."""
        cost = self.base_cost(tp)
        if self.constrained:
            cost = ConstrainedCostModel(cost, self.constrained, self.mask_s_per_row)
        cost = self.corrections.of(cost)
        return cost if self.stretch == 1.0 else StretchedCostModel(cost, self.stretch)

    @property
    def roofline_error(self) -> float | None:
        """Mean relative error of TPOT over published measurements; None: none were made."""
        return self.device.cost_error if self.model.shape.experts is None else self.device.expert_cost_error

    def cost_error(self, tp: int) -> float | None:
        """Mean relative error of step times of workers so wide where they were held against measurements; None: not
        known."""
        without = self.measured[tp].fit_error if self.measured else self.roofline_error or ROOFLINE_ERROR
        if (found := self.calibration) is None:
            return without
        if tp in found.widths:
            return found.error
        return None if without is None else max(found.error, without)

    def base_cost(self, tp: int) -> CostModel:
        """Neither calibrated nor with masks. Raises ConfigError when a measured model lacks this width."""
        if self.measured:
            if tp not in self.measured:
                known = ", ".join(map(str, sorted(self.measured)))
                raise ConfigError(
                    f"tp: expected a width at which the cost model was measured ({known}), got {tp}", field="tp"
                )
            return self.measured[tp]
        device, shape = self.device, self.model.shape
        return RooflineCostModel(
            shape,
            device.shape(shape.weight_bytes, shape.experts.weight_bytes if shape.experts else shape.weight_bytes),
            device.link.shape(),
            tp,
            device.fabric.shape() if tp > 1 else None,
        )

    def widths(self) -> list[int]:
        """TP widths that divide the model, fit into a node and leave memory for KV."""
        most = self.device.devices_per_node
        known = sorted(self.measured) if self.measured else [1 << power for power in range(most.bit_length())]
        return [tp for tp in known if tp <= most and self.model.fits_tp(tp) and self.kv_tokens(tp) > 0]

    def kv_rank_bytes(self, tp: int) -> float:
        """Memory of each rank of a worker for KV."""
        return self.device.memory_bytes * self.device.memory_share - self.model.resident_bytes / tp

    def kv_tokens(self, tp: int, rank_bytes: float | None = None) -> int:
        """Tokens that the KV pool of one worker holds; `rank_bytes` None: all memory left. With more ranks than KV
        heads, ranks keep copies."""
        memory = tp * (self.kv_rank_bytes(tp) if rank_bytes is None else rank_bytes)
        copies = max(1, tp / self.model.shape.kv_heads)
        return max(0, int(memory / (self.model.shape.kv_token_bytes * copies)))

    def pool(self, workers: int, tp: int) -> PoolSetup:
        """Raises ConfigError when the weights leave no memory for KV."""
        tokens = self.kv_tokens(tp)
        if tokens == 0:
            need = self.model.resident_bytes / (self.device.memory_bytes * self.device.memory_share)
            raise ConfigError(
                f"tp: expected more ranks than {tp}: {self.model.name} needs more than {need:.1f} x {self.device.name}",
                field="tp",
            )
        return PoolSetup(workers, tp, self.cost(tp), tokens, acceptance=self.acceptance)


@dataclass(frozen=True, slots=True)
class MixedHardware:
    """Prefill workers on one device, decode workers on another, with the same model. A worker keeps its role."""

    prefill: Hardware
    decode: Hardware

    @classmethod
    def pair(cls, prefill: Hardware, decode: Hardware) -> MixedHardware:
        """With the slower of both links for each, which a handoff crosses. Raises ConfigError if KV of one is not KV of
        the other."""
        for each in (prefill, decode):
            assert not each.measured, "the cost models contain a link"
        if prefill.model != decode.model:
            sizes = ", ".join(f"{each.device.element_bytes:g} of {each.name}" for each in (prefill, decode))
            raise ConfigError(
                "--device: element_bytes: expected the same for both roles, because a decode worker takes KV as the "
                f"prefill worker has it; got {sizes}: name other devices (--device is that of a role whose option is "
                "left out)",
                field="element_bytes",
            )
        link = prefill.device.link.slower(decode.device.link)
        return cls(*(replace(each, device=each.device.model_copy(update={"link": link})) for each in (prefill, decode)))

    @property
    def model(self) -> PlannedModel:
        return self.decode.model

    @property
    def name(self) -> str:
        """Prefill before decode, as in a layout."""
        return f"{self.prefill.name}:{self.decode.name}"

    @property
    def is_mixed(self) -> bool:
        return True

    def of(self, role: Role) -> Hardware:
        return self.prefill if role is Role.PREFILL else self.decode

    def stretched(self, factor: float) -> MixedHardware:
        return MixedHardware(self.prefill.stretched(factor), self.decode.stretched(factor))


RoleHardware: TypeAlias = Hardware | MixedHardware
"""`of(role)` is what its workers run on."""


def cost_digest(hardware: Hardware, tp: int) -> str:
    """Of what the times of steps are computed from, without corrections."""
    return hashlib.blake2b(repr(hardware.base_cost(tp)).encode(), digest_size=12).hexdigest()


def check_calibration(found: Calibration, hardware: Hardware) -> None:
    """Raises ConfigError if it was made for other steps than those of `hardware`."""
    for name, made_for, given in (
        ("model", found.model, hardware.model.name), ("device", found.device, hardware.device.name)
    ):  # fmt: skip
        if made_for != given:
            raise ConfigError(
                f"--calibration: expected one made for {name} {given}, got one for {made_for}", field="--calibration"
            )
    if found.cost != cost_digest(hardware, found.decode_tp):
        raise ConfigError(
            "--calibration: expected the cost model that it corrects, got another one: calibrate again, with the same "
            "--cost, --element-bytes and device file",
            field="--calibration",
        )


def setup_of_spec(
    spec: ClusterSpec, hardware: RoleHardware, *, mean_prompt_tokens: float, trace_block: int | None
) -> Setup:
    """The simulator's setup of the cluster in `spec` on this hardware. Raises ConfigError, also for workers of the
    other kind of device."""
    if len(spec.models) != 1:
        raise ConfigError(f"models: expected one model to simulate, got {len(spec.models)}", field="models")
    model = spec.models[0]
    check_one_cost(model, is_mixed=hardware.is_mixed)
    engine = model.engine_of(Role.DECODE)
    of_role = {role: _as_served(hardware.of(role), model, role) for role in Role}

    def pool(role: Role) -> PoolSetup:
        name, wanted, engine, hardware = role.value, model.pool(role), model.engine_of(role), of_role[role]
        if not hardware.model.fits_tp(wanted.tp):
            fitting = ", ".join(map(str, hardware.model.fitting_tps()))
            raise ConfigError(
                f"{name}.tp: expected one of {fitting} for {hardware.model.name}, got {wanted.tp}", field=f"{name}.tp"
            )
        found = hardware.pool(wanted.workers, wanted.tp)
        on_gpu = hardware.device.kind == "cuda"
        kv_tokens = hardware.kv_tokens(wanted.tp, engine.kv_memory_bytes if on_gpu else engine.cpu_pool_bytes)
        return replace(
            found,
            kv_tokens=kv_tokens if engine.kv_blocks is None else engine.kv_blocks * engine.block_tokens,
            max_running_requests=engine.max_running_requests,
            max_step_tokens=engine.max_step_tokens,
            longest_step_s=engine.longest_step_s,
            batches=BatchRule.of(engine),
        )

    setup = make_setup(
        of_role[Role.DECODE],
        pool(Role.PREFILL) if model.prefill.workers else None,
        pool(Role.DECODE),
        router=spec.router,
        max_running_requests=engine.max_running_requests,
        max_step_tokens=engine.max_step_tokens,
        max_model_tokens=min(
            (limit for role in Role if (limit := model.engine_of(role).max_model_tokens) is not None), default=None
        ),
        block_tokens=simulated_block_tokens(engine.block_tokens, mean_prompt_tokens, trace_block),
    )
    return replace(
        setup,
        autoscaler=spec.autoscaler,
        can_change_roles=model.can_change_roles and not hardware.is_mixed,
        device_share=engine.device_share,
    )


def spec_notes(spec: ClusterSpec, hardware: RoleHardware) -> list[str]:
    """What of `spec` is simulated otherwise than it would be deployed, or unlike the device file."""
    model = spec.models[0]
    return list(dict.fromkeys(note for role in Role for note in _notes(model, role, hardware.of(role))))


def _notes(model: ModelSpec, role: Role, hardware: Hardware) -> Iterator[str]:
    engine, device = model.engine_of(role), hardware.device
    if hardware.acceptance is not None and engine.speculation == "none":
        field = model.engine_field(role, "speculation")
        yield f"{field} is none, and speculation is simulated: set it to deploy what is simulated here"
    if not _is_named(model, role, "device") and device.kind == "cuda":
        field = model.engine_field(role, "device")
        yield f"{field} is {engine.device}, its default; set it to cuda to deploy what is simulated here"
    _, _, wide = engine_bytes(engine)
    if _has_dtype(model, role) and wide != device.element_bytes:
        yield (
            f"{model.engine_field(role, 'dtype')} is {engine.dtype}: elements of {wide:g} bytes, where the file of "
            f"{device.name} has {device.element_bytes:g}; its peaks of arithmetic stay as they are"
        )


def _as_served(hardware: Hardware, model: ModelSpec, role: Role) -> Hardware:
    """A rank's share of the device, with elements in the engine's formats."""
    engine, device = model.engine_of(role), hardware.device
    if _is_named(model, role, "device") and engine.on_gpu != (device.kind == "cuda") and model.pool(role).workers:
        raise ConfigError(
            f"--device: expected one of kind {'cuda' if engine.on_gpu else 'cpu'}, because "
            f"{model.engine_field(role, 'device')} of the spec is {engine.device}, got {device.name}: name the device "
            "that its workers run on",
            field="--device",
        )
    if hardware.profiled is not None and model.pool(role).workers:
        hardware.profiled.check_engine(model, role)
    of_dtype = _has_dtype(model, role) and hardware.model.gap is None
    served = _in_formats_of(engine, hardware.model, of_dtype=of_dtype)
    return replace(hardware, device=device.shared(engine.device_share), model=served)


def _is_named(model: ModelSpec, role: Role, name: str) -> bool:
    """Whether the spec sets this field of a role's engine."""
    return name in model.engine.model_fields_set or getattr(model.pool(role).engine, name) is not None


def _has_dtype(model: ModelSpec, role: Role) -> bool:
    """Whether the spec decides the dtype: with a device of its own, a default one too."""
    return _is_named(model, role, "dtype") or _is_named(model, role, "device")


def _in_formats_of(engine: EngineSpec, model: PlannedModel, *, of_dtype: bool) -> PlannedModel:
    """Weights and KV in the formats that the spec names, all in its dtype if `of_dtype`; otherwise as they are."""
    shape, (weights, kv, wide) = model.shape, engine_bytes(engine)
    if of_dtype:
        shape = replace(shape, activation_bytes=wide)
    if of_dtype or engine.weights != "dense":
        experts = shape.experts and replace(shape.experts, weight_bytes=weights)
        shape = replace(shape, weight_bytes=weights, experts=experts)
    if of_dtype or engine.kv_dtype != "auto":
        shape = replace(shape, kv_bytes=kv)
    return replace(model, shape=shape)


def check_one_cost(model: ModelSpec, *, is_mixed: bool = False) -> None:
    """Raises ConfigError if the roles' engines differ in what decides the time of a step. `is_mixed`: each role has its
    own device, and that device's format of weights."""
    prefill, decode = (model.engine_of(role) for role in Role)
    if is_mixed and decode.device_share < 1:
        field = model.engine_field(Role.DECODE, "device_share")
        raise ConfigError(
            f"{field}: expected 1, because roles on different devices share none, got {decode.device_share:g}",
            field=field,
        )
    for name in (
        "device",
        "device_share",
        "dtype",
        *(() if is_mixed else ("weights",)),
        "kv_dtype",
        "threads_per_rank",
    ):
        if getattr(prefill, name) != getattr(decode, name):
            role = Role.PREFILL if getattr(model.prefill.engine, name) is not None else Role.DECODE
            field = model.engine_field(role, name)
            raise ConfigError(
                f"{field}: both roles share one cost model; expected the same value for both, got "
                f"{getattr(prefill, name)} for prefill and {getattr(decode, name)} for decode",
                field=field,
            )


def make_setup(
    hardware: Hardware,
    prefill: PoolSetup | None,
    decode: PoolSetup,
    *,
    router: RouterSpec,
    max_running_requests: int,
    max_step_tokens: int,
    block_tokens: int,
    max_model_tokens: int | None = None,
) -> Setup:
    """`max_model_tokens`: as of the engine, which has no longer context than the model."""
    shape, context_tokens = hardware.model.shape, hardware.model.context_tokens
    return Setup(
        prefill, decode, shape.layers, shape.kv_heads, shape.kv_token_bytes, router, max_running_requests,
        max_step_tokens, min(max_model_tokens or context_tokens, context_tokens), block_tokens, host=hardware.host,
        fixed_s=hardware.corrections.fixed_s,
    )  # fmt: skip


def simulated_block_tokens(engine_block: int, mean_prompt_tokens: float, trace_block: int | None) -> int:
    """A block size larger than the engine's, for prompts so long that the difference does not matter."""
    size = engine_block
    most = mean_prompt_tokens / _ROUNDING
    while size * 2 <= most:
        size *= 2
    if trace_block is not None:
        while size > 1 and size % trace_block and trace_block % size:
            size //= 2
    return size
