"""The machines that a layout runs on, and their prices: of one model of device, or of one for each role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from planner.devices import DeviceSpec
from planner.hardware import RoleHardware
from planner.search.layout import ClusterLayout
from tandem.config.model import Role


@dataclass(frozen=True, slots=True)
class MachineKind:
    """Machines with one model of device. `price_per_hour`: dollars for one device."""

    device: str
    price_per_hour: float
    devices_per_node: int

    @classmethod
    def of(cls, device: DeviceSpec) -> MachineKind:
        return cls(device.name, device.price_per_hour, device.devices_per_node)


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of one kind to deploy workers on. Machines are whole, so they may have more devices than the plan;
    if the deployment is a single machine, it has the plan's devices only."""

    count: int
    devices: int  # of each

    @classmethod
    def of(cls, widths: Iterable[int], devices_per_node: int, *, are_all: bool = True) -> Machines:
        """The fewest machines for workers of these widths; the ranks of a worker share a machine. `are_all`: there are
        no other machines, and if one is enough, it has the devices of its workers only."""
        widest_first = sorted(widths, reverse=True)
        free: list[int] = []
        for width in widest_first:
            place = next((at for at, left in enumerate(free) if left >= width), None)
            if place is None:
                free.append(devices_per_node - width)
            else:
                free[place] -= width
        is_alone = are_all and len(free) < 2
        return cls(len(free), sum(widest_first) if is_alone else devices_per_node)

    @property
    def all_devices(self) -> int:
        return self.count * self.devices


@dataclass(frozen=True, slots=True)
class Deployed:
    """A layout on whole machines. `of_role`: those of each role, if the roles have different kinds."""

    machines: int
    devices: int
    per_hour: float
    of_role: tuple[tuple[Role, Machines], ...] = ()

    def __str__(self) -> str:
        return f"{self.devices}, ${self.per_hour:.2f}"

    def to_json(self) -> dict[str, Any]:
        found = {"machines": self.machines, "devices": self.devices, "per_hour": self.per_hour}
        of_role = {role.value: {"machines": each.count, "devices": each.all_devices} for role, each in self.of_role}
        return found | ({"of_role": of_role} if of_role else {})


@dataclass(frozen=True, slots=True)
class MachineKinds:
    """Those of prefill and of decode workers. Roles of one kind share machines. `are_whole`: a layout costs what
    its machines cost, not only the devices of its workers."""

    prefill: MachineKind
    decode: MachineKind
    are_whole: bool = False

    @classmethod
    def of(cls, hardware: RoleHardware, *, are_whole: bool = False) -> MachineKinds:
        prefill, decode = (MachineKind.of(hardware.of(role).device) for role in (Role.PREFILL, Role.DECODE))
        return cls(prefill, decode, are_whole)

    @property
    def is_mixed(self) -> bool:
        return self.prefill != self.decode

    @property
    def device(self) -> str:
        """`h100`, or `h100:h200` for prefill on the first and decode on the second."""
        return f"{self.prefill.device}:{self.decode.device}" if self.is_mixed else self.decode.device

    @property
    def prices(self) -> str:
        """Of a device and hour."""
        if not self.is_mixed:
            return f"${self.decode.price_per_hour:.2f} per device and hour"
        kinds = (f"${each.price_per_hour:.2f} per {each.device}" for each in (self.prefill, self.decode))
        return f"{' and '.join(kinds)} and hour"

    def of_role(self, role: Role) -> MachineKind:
        return self.prefill if role is Role.PREFILL else self.decode

    def per_hour(self, layout: ClusterLayout) -> float:
        """Dollars for the devices of its workers, or for its machines."""
        if self.are_whole:
            return self.deployed(layout).per_hour
        return self._dollars({role: layout.devices_of(role) for role in Role})

    def devices(self, layout: ClusterLayout) -> int:
        """That are paid."""
        return self.deployed(layout).devices if self.are_whole else layout.devices

    def price(self, layout: ClusterLayout) -> float:
        """What layouts are ordered by: dollars per hour, or the number of devices if all cost the same or nothing."""
        return self.devices(layout) if self._has_one_price else self.per_hour(layout)

    def deployed_price(self, layout: ClusterLayout) -> float:
        """The same on whole machines."""
        return replace(self, are_whole=True).price(layout)

    def machines(self, layout: ClusterLayout) -> tuple[Machines, ...]:
        """Those of all workers, or of two kinds those of each role, prefill first."""
        workers = {role: _widths(layout, role) for role in Role}
        if not self.is_mixed:
            return (Machines.of([tp for each in workers.values() for tp in each], self.decode.devices_per_node),)
        are_all = not all(workers.values())
        return tuple(
            Machines.of(each, self.of_role(role).devices_per_node, are_all=are_all) for role, each in workers.items()
        )

    def deployed(self, layout: ClusterLayout) -> Deployed:
        machines = self.machines(layout)
        count, devices = sum(each.count for each in machines), sum(each.all_devices for each in machines)
        if not self.is_mixed:
            return Deployed(count, devices, devices * self.decode.price_per_hour)
        of_role = dict(zip(Role, machines, strict=True))
        per_hour = self._dollars({role: each.all_devices for role, each in of_role.items()})
        return Deployed(count, devices, per_hour, tuple(of_role.items()))

    def to_json(self) -> dict[str, Any]:
        """Of one kind: its fields. Of two: the fields of each role's."""
        if not self.is_mixed:
            return _fields(self.decode)
        return {"device": self.device, "of_role": {role.value: _fields(self.of_role(role)) for role in Role}}

    @property
    def _has_one_price(self) -> bool:
        return self.prefill.price_per_hour == self.decode.price_per_hour

    def _dollars(self, devices: dict[Role, int]) -> float:
        if self._has_one_price:
            return sum(devices.values()) * self.decode.price_per_hour
        # Rounded, so that sums in another order are the same price.
        return round(sum(count * self.of_role(role).price_per_hour for role, count in devices.items()), 9)


def _widths(layout: ClusterLayout, role: Role) -> list[int]:
    """Of each worker."""
    if role is Role.PREFILL:
        return [layout.prefill_tp] * layout.prefill_workers
    return [layout.decode_tp] * layout.decode_workers


def _fields(kind: MachineKind) -> dict[str, Any]:
    return {
        "device": kind.device,
        "price_per_hour": kind.price_per_hour,
        "devices_per_node": kind.devices_per_node,
    }
