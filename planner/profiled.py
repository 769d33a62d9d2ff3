"""What a file of `tandem profile` was measured on. Its step times are those of no other model and engine settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.devices import DeviceSpec
from planner.fitted import read_json
from planner.models import PlannedModel
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec, Role
from tandem.errors import ConfigError

SETTINGS = ("device", "dtype", "weights", "kv_dtype", "threads_per_rank")  # of an engine, that decide its step times


@dataclass(frozen=True, slots=True)
class Profiled:
    """`sizes` of the model, `engine`; None: the file does not say, as those of earlier versions."""

    file: str
    model: str
    sizes: Mapping[str, int] | None
    engine: EngineSpec | None

    @classmethod
    def read(cls, path: Path) -> Profiled | None:
        """None: the file has no measurements of `tandem profile`. Raises ConfigError if it is no JSON object."""
        content = read_json(path)
        if "widths" not in content:
            return None
        about = content.get("about")
        found = about if isinstance(about, dict) else {}
        try:
            engine = EngineSpec.model_validate_json(found.get("engine") or "")
        except ValueError:  # pydantic's too
            engine = None
        sizes = found.get("sizes")
        return cls(path.name, str(found.get("model", "unknown")), sizes if isinstance(sizes, dict) else None, engine)

    def check(self, model: PlannedModel, device: DeviceSpec) -> None:
        """Raises ConfigError if `model` has other sizes or `device` is of the other kind."""
        planned = model.shape
        own = _sizes(planned.layers, planned.hidden or 0, planned.heads, planned.kv_heads)
        if self.sizes not in (None, own):
            raise ConfigError(
                f"--cost: expected step times of {model.name} ({_said(own)}), got {self.file}, measured on "
                f"{self.model} ({_said(self.sizes or {})}): run `tandem profile` with the model that you plan for, or "
                "leave out --cost",
                field="--cost",
            )
        if self.engine is not None and self.engine.on_gpu != (device.kind == "cuda"):
            raise ConfigError(
                f"--device: expected one of kind {'cuda' if self.engine.on_gpu else 'cpu'}, because {self.file} was "
                f"measured with engine.device {self.engine.device}, got {device.name}",
                field="--device",
            )

    def check_engine(self, model: ModelSpec, role: Role) -> None:
        """Raises ConfigError if a spec's engine has settings that were not measured."""
        if self.engine is None:
            return
        for name in SETTINGS[1:]:  # the kind of device was checked
            measured, got = getattr(self.engine, name), getattr(model.engine_of(role), name)
            if measured != got:
                field = model.engine_field(role, name)
                raise ConfigError(
                    f"{field}: expected {measured}, with which {self.file} was measured, got {got}: run `tandem "
                    "profile` with this spec, or change it",
                    field=field,
                )

    def notes(self, model: PlannedModel) -> Iterator[str]:
        """What could not be checked, and what a device is."""
        if self.sizes is None:
            yield f"{self.file} does not say the sizes of its model ({self.model}) and is taken for {model.name}"
        if self.engine is None:
            yield f"{self.file} does not say its engine settings"
        elif not self.engine.on_gpu and (threads := self.engine.threads_per_rank) > 1:
            yield f"a device is a rank of {threads} threads: --price is that of as many cores"


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """For a file of `tandem profile`."""
    return _sizes(config.layers, config.hidden_size, config.heads, config.kv_heads)


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
