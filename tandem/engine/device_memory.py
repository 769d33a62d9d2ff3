"""Divides a GPU's memory among weights, activations, work space and KV blocks.

Weights are loaded first. Then the largest steps run once, on one block, to measure their activations. The KV pool gets
the rest of the rank's share, except for a reserve for what torch does not allocate and for recorded decode steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np
import torch

from tandem.config.engine import EngineSpec
from tandem.engine.allocation_failures import is_out_of_memory
from tandem.engine.step import Draw, Penalties, SequenceStep, StepInput
from tandem.errors import InsufficientMemory
from tandem.kvcache.layout import blocks_for
from tandem.request import MAX_LOGPROBS

# CUDA contexts of the rank and of its transfer agent, NCCL's buffers and libraries' work space.
UNTRACKED_BYTES: Final = 1 << 30
_LARGE_TOP_K: Final = 30_000
_FRAGMENTS: Final = 32  # of the share, one part is lost between allocations

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory of one rank's device, in bytes."""

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What no process uses."""
        ...

    def allocated_bytes(self) -> int:
        """What this rank's tensors use."""
        ...

    def limit(self, share: float) -> None:
        """Allocations beyond this share of the total fail from now on."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most that `work` allocates at a time. All of it is returned to the device."""
        ...


class CudaMemory:
    """Of torch's allocator and the CUDA driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = int(torch.cuda.get_device_properties(device).total_memory)

    @property
    def total_bytes(self) -> int:
        return self._total

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def limit(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.allocated_bytes()
        work()
        torch.cuda.synchronize(self._device)
        peak = int(torch.cuda.max_memory_allocated(self._device)) - before
        torch.cuda.empty_cache()
        return peak


def kv_budget(total: int, share: float, used_by_rank: int, activation_peak: int, reserve: int) -> int:
    """Bytes of a rank's share of `total` that are left for KV blocks; negative if it is too small for the rest."""
    return int(total * share) - used_by_rank - activation_peak - reserve


def measured_budget(memory: DeviceMemory, spec: EngineSpec, steps: Callable[[], object], *, records: bool) -> int:
    """Bytes left for KV blocks after the weights, which are loaded.

    Args:
        steps: runs the largest steps.
        records: decode steps are recorded, and keep their activations.

    Raises:
        InsufficientMemory: the steps do not fit beside the weights, or nothing is left.
    """
    weights, share = memory.allocated_bytes(), int(memory.total_bytes * spec.device_share)
    with insufficient_memory(
        "engine.max_step_tokens",
        f"weights need {weights} bytes, and a step of {spec.max_step_tokens} tokens does not fit beside them: raise "
        "engine.device_share, or lower engine.max_step_tokens",
    ):
        peak = memory.peak_bytes(steps)
    reserve = UNTRACKED_BYTES + share // _FRAGMENTS + (peak if records else 0)
    free = memory.free_bytes()
    # Others may use more of the device than their shares.
    budget = min(kv_budget(memory.total_bytes, spec.device_share, weights, peak, reserve), free - peak - reserve)
    said = (
        f"weights need {weights} bytes, activations {peak}, work space {reserve}; device_share gives {share} of "
        f"{memory.total_bytes}, of which {free} are free now"
    )
    if budget <= 0:
        raise InsufficientMemory(
            f"engine.device_share: expected memory for KV blocks, got none: {said}: raise engine.device_share, lower "
            "engine.max_step_tokens or max_running_requests, raise tp, or end what else uses the device",
            field="engine.device_share",
        )
    logger.info("%d bytes are left for KV blocks: %s", budget, said)
    return budget


def largest_steps(spec: EngineSpec, max_model_tokens: int) -> Iterator[StepInput]:
    """The steps that need most memory, with all tables on block 0: one chunk at the end of the longest context, and as
    many short chunks as there may be requests, each with tokens to draw in the costliest way."""
    longest = min(spec.max_step_tokens, max_model_tokens)
    yield StepInput([_chunk(spec, max_model_tokens - longest, longest)], [])
    requests = min(spec.max_running_requests, spec.max_step_tokens)
    each = min(spec.max_step_tokens // requests, max_model_tokens)
    proposed = spec.speculation_tokens if spec.speculation != "none" else 0
    samples = (1 + spec.speculation_branches) * (1 + proposed)
    yield StepInput([_chunk(spec, 0, each, min(each, samples))] * requests, [])


def _chunk(spec: EngineSpec, start: int, count: int, samples: int = 1) -> SequenceStep:
    blocks = [0] * blocks_for(start + count, spec.block_tokens)
    one = np.zeros(1, dtype=np.int32).tobytes()
    penalties = Penalties(
        repetition=1.1, frequency=0.1, presence=0.1, adds_last=False, prompt=one, answer=one, counts=one, biased=one,
        biases=np.zeros(1, dtype=np.float32).tobytes(),
    )  # fmt: skip
    draw = Draw(
        start + count, seed=0, temperature=1.0, top_k=_LARGE_TOP_K, top_p=0.5, min_p=0.1, penalties=penalties,
        logprobs=MAX_LOGPROBS,
    )  # fmt: skip
    return SequenceStep([0] * count, start, blocks, samples=samples, draws=[draw] * samples)


@contextmanager
def insufficient_memory(field: str, said: str) -> Iterator[None]:
    """Converts a failed allocation to InsufficientMemory of `field`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemory(f"{field}: {said}", field=field) from error
