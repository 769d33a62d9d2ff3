"""Experts in groups against the loop that Tandem used before, which searched each expert's tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import InternalError
from tandem.model.device_ops import choose_ops
from tandem.model.experts import SeparateExperts, SparseMlp, choose_experts
from tandem.model.kernel_check import checked_kernels
from tandem.model.matrices import MatrixMaker
from tandem.model.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    experts: int = 64
    per_token: int = 8
    hidden: int = 1024
    expert_size: int = 512
    prompt: int = 512
    batch: int = 8


SIZES = ExpertSizes()
QUICK = ExpertSizes(4, 2, 32, 16, 24, 3)


def expert_ratios(sizes: ExpertSizes, threads: int, rounds: int) -> Iterator[tuple[str, float]]:
    """(name, how many times as long the loop takes) for a prompt and for a decode step, in fp32."""
    torch.set_num_threads(threads)
    mlp = _mlp(sizes, threads)
    for name, tokens in (("prefill", sizes.prompt), ("decode", sizes.batch)):
        x = torch.randn(tokens, sizes.hidden, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            if not torch.equal(mlp(x), loop(mlp, x)):  # and warms up
                raise InternalError("moe: expected the loop's results from the experts in groups, got others")
            # Others use the machine's cores too: the least of each and, with one thread, its own time.
            clock = time.thread_time if threads == 1 else time.perf_counter
            took = [[_time_s(clock, run, mlp, x) for run in (loop, SparseMlp.__call__)] for _ in range(4 * rounds)]
        searched, grouped = map(min, zip(*took, strict=True))
        yield name, searched / grouped


def loop(mlp: SparseMlp, x: Tensor) -> Tensor:
    """[tokens, hidden] → the same, by a search for the tokens of each expert."""
    experts = mlp.experts
    assert isinstance(experts, SeparateExperts)
    weights, chosen = mlp._route(x)
    out = torch.zeros_like(x)
    for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        tokens, places = (chosen == number).nonzero(as_tuple=True)
        if len(tokens):
            answer = down(experts.ops.gated(gate_up(x[tokens]), experts.activation))
            out.index_add_(0, tokens, answer.mul_(weights[tokens, places].unsqueeze(1)))
    return out


def _mlp(sizes: ExpertSizes, threads: int) -> SparseMlp:
    generator = torch.Generator().manual_seed(0)
    kernels = checked_kernels(threads)
    maker, ops = MatrixMaker(kernels=kernels), choose_ops(kernels, torch.device("cpu"), torch.float32)

    def some(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)

    gate_up = [maker(some(2 * sizes.expert_size, sizes.hidden)) for _ in range(sizes.experts)]
    down = [maker(some(sizes.hidden, sizes.expert_size)) for _ in range(sizes.experts)]
    return SparseMlp(
        gate=maker(some(sizes.experts, sizes.hidden)),
        experts=choose_experts(gate_up, down, "silu", ops),
        first=0,
        count=sizes.experts,
        per_token=sizes.per_token,
        renormalise=True,
        tp=TensorParallel(),
    )


def _time_s(clock: Callable[[], float], run: Callable[[SparseMlp, Tensor], Tensor], mlp: SparseMlp, x: Tensor) -> float:
    began = clock()
    run(mlp, x)
    return clock() - began
