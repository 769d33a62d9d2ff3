"""Experts that are multiplied in groups answer as when each token asks its own."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.model.experts import (
    SeparateExperts,
    SparseMlp,
    StackedExperts,
    _without_waiting,
    added_in_order,
    choose_experts,
    grouped_error,
)
from tandem.model.kernel_check import checked_kernels
from tandem.model.matrices import Dense, MatrixMaker, Weights
from tandem.model.ops import TORCH_OPS
from tandem.model.parallel import TensorParallel

HIDDEN, SIZE, COUNT, PER_TOKEN = 32, 16, 8, 3
CPU = torch.device("cpu")


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


GATE, GATE_UP, DOWN = some(COUNT, HIDDEN), some(COUNT, 2 * SIZE, HIDDEN, seed=1), some(COUNT, HIDDEN, SIZE, seed=2)


def separate(maker: MatrixMaker | None = None, own: slice = slice(0, COUNT)) -> SeparateExperts:
    maker = maker or MatrixMaker()
    return SeparateExperts(tuple(map(maker, GATE_UP[own])), tuple(map(maker, DOWN[own])), "silu", TORCH_OPS)


def stacked(own: slice = slice(0, COUNT)) -> StackedExperts:
    return StackedExperts(GATE_UP[own], DOWN[own], "silu", TORCH_OPS)


def mlp(experts: SeparateExperts | StackedExperts, first: int = 0, count: int = COUNT) -> SparseMlp:
    return SparseMlp(Dense(GATE), experts, first, count, PER_TOKEN, True, TensorParallel())


def by_token(x: Tensor, own: slice = slice(0, COUNT)) -> Tensor:
    """Token by token, in order of the experts' numbers."""
    out = torch.zeros_like(x)
    weights, chosen = (x @ GATE.T).softmax(dim=1).topk(PER_TOKEN)
    weights = weights / weights.sum(dim=1, keepdim=True)
    for token, (of_token, numbers) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, number in sorted(zip(of_token, numbers, strict=True), key=lambda each: each[1]):
            if own.start <= number < own.stop:
                gated = TORCH_OPS.gated((x[token] @ GATE_UP[number].T)[None], "silu")
                out[token] += weight * (gated[0] @ DOWN[number].T)
    return out


@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("experts", [separate(), stacked()], ids=["separate", "stacked"])
def test_groups_answer_as_token_by_token(experts: SeparateExperts | StackedExperts, tokens: int) -> None:
    x = some(tokens, HIDDEN, seed=3)
    torch.testing.assert_close(mlp(experts)(x.clone()), by_token(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 2, 6])
def test_a_rank_adds_its_own_experts_alone(first: int) -> None:
    own = slice(first, first + 2)
    x = some(9, HIDDEN, seed=4)
    got = mlp(separate(own=own), first, 2)(x)
    torch.testing.assert_close(got, by_token(x, own), atol=1e-6, rtol=1e-5)


def test_a_rank_whose_experts_nobody_chose_adds_nothing() -> None:
    x = some(1, HIDDEN, seed=5)
    unchosen = next(n for n in range(COUNT) if not by_token(x, slice(n, n + 1)).any())
    assert not mlp(separate(own=slice(unchosen, unchosen + 1)), unchosen, 1)(x).any()


def test_answers_are_added_in_order_without_those_of_other_ranks() -> None:
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    answers = some(6, HIDDEN)
    right = torch.zeros(2, HIDDEN).index_add_(0, order[:4] // 3, answers[:4])
    answers[4:] = torch.nan  # undefined
    got = added_in_order(answers, order, torch.arange(6) >= 4, torch.Size((2, 3)))
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("weights", [Weights.DENSE, Weights.INT8, Weights.INT4])
def test_a_tokens_bits_are_the_same_in_any_batch(weights: Weights) -> None:
    maker = MatrixMaker(weights, checked_kernels(1), batch_invariant=True)
    experts = mlp(separate(maker))
    experts = replace(experts, gate=replace(maker, weights=Weights.DENSE)(GATE))
    x = some(200, HIDDEN, seed=6)
    together = experts(x.clone())
    for token in (0, 7, 199):
        assert torch.equal(experts(x[token : token + 1].clone())[0], together[token])


def test_a_token_that_is_no_number_spoils_no_other() -> None:
    x = some(6, HIDDEN, seed=7)
    x[2, 3] = torch.nan
    got = mlp(separate())(x.clone())
    assert got.isfinite().all(dim=1).tolist() == [True, True, False, True, True, True]


def test_no_expert_makes_the_host_wait() -> None:
    """What depends on values waits for a GPU: only one list of borders may."""

    class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.called: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names() as names:
        mlp(separate())(some(20, HIDDEN))
    assert not {"nonzero", "unique", "_unique2", "bincount", "_local_scalar_dense", "masked_select"} & {*names.called}


def test_torchs_grouped_product_is_as_expected() -> None:
    assert [*inspect.signature(F.grouped_mm).parameters] == ["mat_a", "mat_b", "offs", "bias", "out_dtype"]
    assert grouped_error(torch.Size((24, 16)), torch.bfloat16, CPU) is None


def test_a_grouped_product_that_fails_or_is_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    size = torch.Size((24, 16))
    assert "RuntimeError" in str(grouped_error(torch.Size((24, 3)), torch.bfloat16, CPU))
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: torch.zeros(len(a), b.shape[2]))
    assert "differ by 1" in str(grouped_error(size, torch.float32, CPU))


def test_a_cpu_multiplies_expert_by_expert() -> None:
    chosen = choose_experts(separate().gate_up, separate().down, "silu", TORCH_OPS)
    assert isinstance(chosen, SeparateExperts)


def test_a_grouped_product_for_which_the_host_would_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch multiplies in a loop where a GPU lacks the kernel, and reads the groups' ends for that."""
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> None:
        with _without_waiting(torch.device("cuda")):
            assert modes == ["error"]
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        waits()
    assert modes == ["error", "before"]
