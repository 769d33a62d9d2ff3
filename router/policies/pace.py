"""How fast a worker is: a value that router.policies.pace_estimates measures or the simulator sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Until something is measured, all workers are equal, with the ratios of a mid-sized GPU.
START_PREFILL_S_PER_TOKEN = 1 / 4000
START_RESERVE_S = 0.001
START_TRANSFER_S_PER_TOKEN = 20e-6
START_TPOT_S = 0.03
MEMORY_BOUND_REQUESTS = 32  # assumed batch size at which a decode step takes twice as long as an empty one
BATCH_SIZES = tuple(1 << power for power in range(11))  # where TPOT is measured


def batch_shape(batch: float) -> float:
    """Step time of a batch relative to an empty one. Extrapolates TPOT to batch sizes without a measurement."""
    return 1 + batch / MEMORY_BOUND_REQUESTS


def _start_tpots() -> tuple[float, ...]:
    return tuple(START_TPOT_S * batch_shape(batch) for batch in BATCH_SIZES)


@dataclass(frozen=True, slots=True)
class Pace:
    prefill_s_per_token: float = START_PREFILL_S_PER_TOKEN
    reserve_s: float = START_RESERVE_S  # of a decode worker: Reserve to Reserved
    transfer_s_per_token: float = START_TRANSFER_S_PER_TOKEN  # into a decode worker: first token to joined
    tpot_s: tuple[float, ...] = _start_tpots()  # at each of BATCH_SIZES

    def tpot_at_s(self, batch: int) -> float:
        """TPOT at a batch size: linear between two of BATCH_SIZES, beyond the last by `batch_shape`."""
        power, above = self.place(batch)
        if power == len(BATCH_SIZES) - 1:
            return self.tpot_s[-1] * batch_shape(batch) / batch_shape(BATCH_SIZES[-1])
        return self.tpot_s[power] + above * (self.tpot_s[power + 1] - self.tpot_s[power])

    @classmethod
    def mean(cls, paces: Sequence[Pace]) -> Pace:
        """Of at least one."""
        count = len(paces)
        return cls(
            prefill_s_per_token=sum(each.prefill_s_per_token for each in paces) / count,
            reserve_s=sum(each.reserve_s for each in paces) / count,
            transfer_s_per_token=sum(each.transfer_s_per_token for each in paces) / count,
            tpot_s=tuple(sum(at_size) / count for at_size in zip(*(each.tpot_s for each in paces), strict=True)),
        )

    @staticmethod
    def place(batch: int) -> tuple[int, float]:
        """The index of the largest of BATCH_SIZES that is not above the batch, and the batch's place between that and
        the next: 0 to 1. 0 beyond the last."""
        batch = max(1, batch)
        power = min(batch.bit_length(), len(BATCH_SIZES)) - 1
        return power, batch / BATCH_SIZES[power] - 1 if power < len(BATCH_SIZES) - 1 else 0.0


START_PACE = Pace()
