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


def layouts(
    widths: Sequence[int],
    max_devices: int,
    step_tokens: Sequence[int],
    prefill_widths: Sequence[int] | None = None,
) -> Iterator[ClusterLayout]:
    """Every layout of at most `max_devices` devices. `prefill_widths`: of prefill workers on another device, which
    leaves disaggregated layouts only; None: workers of both roles have the same device and `widths`."""
    for tokens in step_tokens:
        for decode_tp in widths:
            for decode_workers in range(1, max_devices // decode_tp + 1):
                if prefill_widths is None:
                    yield ClusterLayout(0, 1, decode_workers, decode_tp, tokens)
                left = max_devices - decode_workers * decode_tp
                for prefill_tp in widths if prefill_widths is None else prefill_widths:
                    for prefill_workers in range(1, left // prefill_tp + 1):
                        yield ClusterLayout(prefill_workers, prefill_tp, decode_workers, decode_tp, tokens)
