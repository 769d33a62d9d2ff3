"""How fast a worker is: a pure value, measured by router.policies.estimates or set by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

# Before anything was measured: all workers are alike, and their ratios are those of a mid-sized GPU.
START_PREFILL_S_PER_TOKEN = 1 / 4000
START_RESERVE_S = 0.001
START_TRANSFER_S_PER_TOKEN = 20e-6
START_TPOT_S = 0.03
MEMORY_BOUND_REQUESTS = 32  # a decode batch of so many is taken to need twice the step time of an empty one
BATCH_SIZES = tuple(1 << power for power in range(11))  # at which TPOT is kept


def batch_shape(batch: float) -> float:
    """Step time of a batch relative to an empty one: carries a TPOT to batch sizes at which none was measured."""
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
        """Between two measured sizes on a straight line; beyond the last by `batch_shape`."""
        power = max(1, batch).bit_length() - 1
        if power >= len(BATCH_SIZES) - 1:
            return self.tpot_s[-1] * batch_shape(batch) / batch_shape(BATCH_SIZES[-1])
        low = BATCH_SIZES[power]
        part = (batch - low) / low if batch > low else 0.0
        return self.tpot_s[power] + part * (self.tpot_s[power + 1] - self.tpot_s[power])


START_PACE = Pace()
