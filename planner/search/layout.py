"""A cluster's layout, which the search varies, and all layouts that fit on given devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.config.model import Role


@dataclass(frozen=True, slots=True, order=True)
class ClusterLayout:
    """`prefill_workers` 0: aggregated. `step_tokens`: the token budget of an engine step."""

    prefill_workers: int
    prefill_tp: int
    decode_workers: int
    decode_tp: int
    step_tokens: int

    @property
    def devices(self) -> int:
        return self.devices_of(Role.PREFILL) + self.devices_of(Role.DECODE)

    def devices_of(self, role: Role) -> int:
        if role is Role.PREFILL:
            return self.prefill_workers * self.prefill_tp
        return self.decode_workers * self.decode_tp

    @property
    def is_aggregated(self) -> bool:
        return self.prefill_workers == 0

    @property
    def widths(self) -> list[tuple[Role, int]]:
        """TP of the workers of each role that has some."""
        decode = (Role.DECODE, self.decode_tp)
        return [decode] if self.is_aggregated else [(Role.PREFILL, self.prefill_tp), decode]

    def __str__(self) -> str:
        """`3xTP2 : 1xTP4 @2048`: prefill, decode, tokens per step."""
        decode = f"{self.decode_workers}xTP{self.decode_tp} @{self.step_tokens}"
        if self.is_aggregated:
            return f"aggregated {decode}"
        return f"{self.prefill_workers}xTP{self.prefill_tp} : {decode}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines to deploy a layout on. Machines are whole, so they may have more devices than the plan."""

    count: int
    devices: int  # of each

    @classmethod
    def of(cls, layout: ClusterLayout, devices_per_node: int) -> Machines:
        """The fewest machines for all workers; the ranks of a worker share a machine."""
        widths = [layout.prefill_tp] * layout.prefill_workers + [layout.decode_tp] * layout.decode_workers
        free: list[int] = []
        for width in sorted(widths, reverse=True):
            place = next((at for at, left in enumerate(free) if left >= width), None)
            if place is None:
                free.append(devices_per_node - width)
            else:
                free[place] -= width
        return cls(len(free), devices_per_node if len(free) > 1 else layout.devices)

    @property
    def all_devices(self) -> int:
        return self.count * self.devices


def layouts(widths: Sequence[int], max_devices: int, step_tokens: Sequence[int]) -> Iterator[ClusterLayout]:
    """Every layout of at most `max_devices` devices."""
    for tokens in step_tokens:
        for decode_tp in widths:
            for decode_workers in range(1, max_devices // decode_tp + 1):
                yield ClusterLayout(0, 1, decode_workers, decode_tp, tokens)
                left = max_devices - decode_workers * decode_tp
                for prefill_tp in widths:
                    for prefill_workers in range(1, left // prefill_tp + 1):
                        yield ClusterLayout(prefill_workers, prefill_tp, decode_workers, decode_tp, tokens)
