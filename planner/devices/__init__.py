"""Devices by name: one YAML file each, shipped here or given by the user. docs/planning.md describes the fields."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from planner.shapes import DeviceShape, LinkShape
from tandem.config.frozen import Frozen
from tandem.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class LinkSpec(Frozen):
    bytes_per_s: Positive
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    efficiency: Share = 1.0

    def shape(self) -> LinkShape:
        return LinkShape(self.bytes_per_s, self.latency_s, self.efficiency)

    def slower(self, other: LinkSpec) -> LinkSpec:
        """What a transfer from one to the other gets: the lower rate, and the longer latency."""
        slow = min(self, other, key=lambda each: each.bytes_per_s * each.efficiency)
        return slow.model_copy(update={"latency_s": max(self.latency_s, other.latency_s)})


class DeviceSpec(Frozen):
    """One device and its connections."""

    name: str
    kind: Literal["cpu", "cuda"] = Field("cuda", description="engine.device of its workers.")
    flops_per_s: Positive = Field(description="Dense peak of 16-bit products, or of those that the device serves.")
    eight_bit_flops_per_s: Positive | None = Field(
        None, description="Dense peak of products with weights of one byte; unset: flops_per_s."
    )
    four_bit_flops_per_s: Positive | None = Field(
        None,
        description="Likewise of half a byte (up to 0.6); unset: flops_per_s, to which weights are converted first.",
    )
    memory_bytes_per_s: Positive
    memory_bytes: Positive
    element_bytes: Positive = Field(
        2.0, description="Bytes of one element of weights and KV, if no option overrides it."
    )
    eight_bit_weights: Literal["fp8", "int8"] = Field(
        "fp8", description="Format in which weights of one byte are served."
    )
    mfu: Share = Field(1.0, description="Share of flops_per_s that prefill reaches.")
    mbu: Share = Field(1.0, description="Share of memory_bytes_per_s that decode reaches.")
    step_overhead_s: Annotated[float, Field(ge=0)] = 0.0
    layer_overhead_s: Annotated[float, Field(ge=0)] = 0.0
    row_overhead_s: Annotated[float, Field(ge=0)] = 0.0
    expert_overhead_s: Annotated[float, Field(ge=0)] = 0.0
    expert_efficiency: Share = Field(1.0, description="Share of mfu and mbu that the weights of experts reach.")
    cost_error: Share | None = Field(
        None, description="Mean relative error of TPOT over measurements that none of this was fitted to."
    )
    expert_cost_error: Share | None = Field(None, description="The same of models with experts.")
    memory_share: Share = Field(0.9, description="Share of memory_bytes for weights and KV; the rest is work space.")
    fabric: LinkSpec = Field(description="Link between the ranks of a worker.")
    link: LinkSpec = Field(description="Link of one device to other workers, which carries KV.")
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = 8
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="Price of one device. Shipped prices are round numbers of 2026: set your own."
    )
    gpu_product: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        repr=False,  # it decides no simulation, and journals of searches are known by this text
        description="Value of the label nvidia.com/gpu.product of Kubernetes nodes with this device.",
    )

    def shared(self, share: float) -> DeviceSpec:
        """What a rank has that uses this share of the device while others use the rest. Links are not divided: their
        transfers come one after the other."""
        if share == 1:
            return self
        names = (
            "flops_per_s", "eight_bit_flops_per_s", "four_bit_flops_per_s", "memory_bytes_per_s", "memory_bytes"
        )  # fmt: skip
        scaled = {name: value * share for name in names if (value := getattr(self, name)) is not None}
        return self.model_copy(update={"name": f"{share:g} of {self.name}", **scaled})

    def shape(self, weight_bytes: float, expert_bytes: float) -> DeviceShape:
        """For weights whose elements have so many bytes."""
        return DeviceShape(
            self.flops_per_s, self.memory_bytes_per_s, self.mfu, self.mbu, self.step_overhead_s,
            self._products_per_s(weight_bytes), self.layer_overhead_s, self.row_overhead_s,
            self._products_per_s(expert_bytes), self.expert_overhead_s, self.expert_efficiency,
        )  # fmt: skip

    def _products_per_s(self, weight_bytes: float) -> float | None:
        """None: as of 16-bit products."""
        if weight_bytes == 1.0:
            return self.eight_bit_flops_per_s
        is_four_bit = 0.5 <= weight_bytes < 0.6  # with the scales of their blocks: MXFP4 0.53, NVFP4 0.56
        return self.four_bit_flops_per_s if is_four_bit else None


def shipped_devices() -> tuple[str, ...]:
    names = (each.name for each in files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if _is_yaml(name)))


def find_device(name: str, option: str = "--device") -> DeviceSpec:
    """Returns a shipped device by name, or one from a YAML file. Raises ConfigError naming the field, or the `option`
    that gave the name, and what was expected."""
    shipped = files(__package__) / f"{name.lower()}.yaml"
    try:
        if name.lower() in shipped_devices():
            text = shipped.read_text(encoding="utf-8")
        elif _is_yaml(name):
            text = Path(name).read_text(encoding="utf-8")
        else:
            known = ", ".join(shipped_devices())
            raise ConfigError(f"{option}: expected {known} or a YAML file, got {name!r}", field=option)
        return DeviceSpec.model_validate(yaml.safe_load(text))
    except OSError as error:
        raise ConfigError(f"{option}: {name}: {error.strerror}", field=option) from None
    except yaml.YAMLError:
        raise ConfigError(f"{option}: {name}: expected YAML, got text that does not parse", field=option) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{option}: {name}: {field}: {first['msg']}", field=field or option) from None


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))
