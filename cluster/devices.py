"""GPUs: what a machine has, and which rank uses which. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from tandem.config.frozen import Frozen
from tandem.errors import ConfigError
from tandem.text.words import plural

CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_UNITS = 10_000  # of one GPU; whole numbers, so that shares add up exactly. Ray has the same resolution.


class Gpu(Frozen):
    """`ordinal`: in the list of GPUs that a process sees, as in torch's `cuda:N`."""

    ordinal: int
    name: str
    memory_bytes: int
    uuid: str


class GpuReport(Frozen):
    """The GPUs that a process of this machine sees.

    `cuda`: the CUDA version of torch's build; None: a build for CPUs. `peers`: (reader, owner) ordinals of which the
    reader's kernels can access the owner's memory. `missing`: why transports' libraries cannot be used, as in
    `kvtransfer.transports.host_support`. `rdma`: whether the process may use an RDMA device.
    """

    torch: str
    cuda: str | None
    gpus: tuple[Gpu, ...] = ()
    peers: frozenset[tuple[int, int]] = frozenset()
    missing: dict[str, str] = Field(default_factory=dict)
    rdma: bool = False


def device_name(ordinal: int) -> str:
    return f"cuda:{ordinal}"


def pinned_ordinal(device: str) -> int | None:
    """The ordinal in `cuda:N`; None for `cuda`."""
    _, _, ordinal = device.partition(":")
    return int(ordinal) if ordinal else None


def device_of(gpu_ids: Sequence[str], visible: str | None) -> str:
    """The device of a rank to which Ray assigned `gpu_ids`.

    Args:
        gpu_ids: `RuntimeContext.get_accelerator_ids()["GPU"]`: entries of the node's CUDA_VISIBLE_DEVICES (numbers or
            UUIDs), or ordinals if the node has none.
        visible: the CUDA_VISIBLE_DEVICES that the rank's process sees.

    Raises:
        ConfigError: more than one GPU, or one that the process does not see.
    """
    if not gpu_ids:
        return CPU
    if len(gpu_ids) > 1:
        raise ConfigError(f"engine.device: expected one GPU for a rank, got {', '.join(gpu_ids)} from Ray")
    (gpu_id,) = gpu_ids
    if visible is None:
        return device_name(int(gpu_id))
    seen = [each.strip() for each in visible.split(",")]
    if gpu_id not in seen:
        raise ConfigError(
            f"engine.device: Ray assigned GPU {gpu_id}, which the rank does not see ({VISIBLE}={visible}): set the "
            "variable for the whole Ray node, before `ray start`",
            field="engine.device",
        )
    return device_name(seen.index(gpu_id))


def narrowed(ordinals: Sequence[int], visible: str | None) -> str:
    """The CUDA_VISIBLE_DEVICES with which a process sees only these of the GPUs that are visible now."""
    seen = visible.split(",") if visible is not None else None
    return ",".join(str(each) if seen is None else seen[each].strip() for each in ordinals)


@dataclass(slots=True)
class DeviceBook:
    """Assigns ranks to GPUs. The ranks of a worker get different GPUs, those with the most free share."""

    ordinals: Sequence[int]
    _given: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def assign(self, group: str, ranks: int, share: float, device: str) -> tuple[str, ...]:
        """One device name per rank. A group keeps its devices until `release`.

        Args:
            share: of one GPU, for each rank.
            device: `cuda`, or `cuda:N` for that GPU only.

        Raises:
            ConfigError: no room.
        """
        pinned, units = pinned_ordinal(device), round(share * _UNITS)
        free = self._free()
        fitting = [each for each in free if free[each] >= units and pinned in (None, each)]
        if len(fitting) < ranks:
            raise ConfigError(self._refusal(group, ranks, share, device), field="engine.device")
        chosen = tuple(sorted(sorted(fitting, key=lambda each: (-free[each], each))[:ranks]))
        self._given[group] = chosen, units
        return tuple(map(device_name, chosen))

    def take(self, group: str, devices: Sequence[str], share: float) -> None:
        """Notes what a group has already."""
        ordinals = [pinned_ordinal(device) for device in devices]
        self._given[group] = tuple(each for each in ordinals if each is not None), round(share * _UNITS)

    def of(self, group: str) -> tuple[str, ...]:
        """The devices of a group, in the order of its ranks; empty if it has none."""
        chosen, _ = self._given.get(group, ((), 0))
        return tuple(map(device_name, chosen))

    def release(self, group: str) -> None:
        self._given.pop(group, None)

    def _free(self) -> dict[int, int]:
        free = dict.fromkeys(self.ordinals, _UNITS)
        for chosen, units in self._given.values():
            for ordinal in chosen:
                free[ordinal] = free.get(ordinal, 0) - units  # a dead GPU may be held and not seen any more
        return free

    def _refusal(self, group: str, ranks: int, share: float, device: str) -> str:
        free = ", ".join(f"{device_name(each)}: {units / _UNITS:g}" for each, units in self._free().items())
        wanted = f"engine.device {device}, engine.device_share {share:g}"
        return (
            f"engine.device: {group} needs a share of {plural(ranks, 'GPU')} ({wanted}), and these shares are free: "
            f"{free or 'none'}: run fewer workers, lower tp or engine.device_share, or add to control.devices"
        )
