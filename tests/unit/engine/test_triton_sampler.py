"""Tokens that Triton's kernels draw are those that the host draws. By Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.engine.device.sampler import DrawRows, sample_on_device
from tandem.engine.device.sampler_choice import choose_draw_rows, draw_error
from tandem.engine.step import Draw
from tests.unit.engine.test_paged_kernels import NEEDS_TRITON, interpreted

CPU = torch.device("cpu")

AS_THE_HOST = """
import sys
from functools import partial
import torch
from tandem.engine.device.sampler import sample_on_device
from tandem.engine.device.triton_sampler import draw_rows
from tandem.sampling.sampler import choose
from tests.unit.engine.test_device_sampler import draw_of, rows_of_all_kinds

count, vocab, block, together = map(int, sys.argv[1:])
logits, params = rows_of_all_kinds(count, vocab, block)
expected = [choose(row.numpy(), each, 2**31 + 9).token_id for row, each in zip(logits, params)]
draws = [draw_of(each, 2**31 + 9) for each in params]
for begin in range(0, count, together):
    part = logits[begin : begin + together]
    best = part.argmax(dim=1)
    some = dict(enumerate(draws[begin : begin + together]))
    found = sample_on_device(part, best, some, best, draw_rows=partial(draw_rows, block=block)).tokens.tolist()
    for row, (token, wanted) in enumerate(zip(found, expected[begin:])):
        assert token == wanted, (some[row], token, wanted)
print("the same")
"""

EDGES = """
from functools import partial
import torch
from tandem.engine.device.sampler import sample_on_device
from tandem.engine.device.triton_sampler import draw_rows
from tandem.request import SamplingParams
from tandem.sampling.sampler import choose
from tests.unit.engine.test_device_sampler import draw_of

def check(logits, params):
    expected = [choose(row.numpy(), each, 3).token_id for row, each in zip(logits, params)]
    best, draws = logits.argmax(dim=1), {row: draw_of(each, 3) for row, each in enumerate(params)}
    chunked = partial(draw_rows, block=128)
    assert sample_on_device(logits, best, draws, best, draw_rows=chunked).tokens.tolist() == expected

equal = torch.zeros(12, 300)
equal[:, 100:106] = 2.0  # in two chunks
equal[:, 140:146] = 2.0
check(equal, [SamplingParams(top_k=6 + seed % 2, seed=seed) for seed in range(12)])
check(equal, [SamplingParams(top_k=9, top_p=0.5, seed=seed) for seed in range(12)])
check(equal, [SamplingParams(top_k=9, top_p=0.999, temperature=9.0, seed=seed) for seed in range(12)])
apart = torch.randn(12, 300, generator=torch.Generator().manual_seed(3))
apart[:, 128:256] += 2.0
check(apart, [SamplingParams(top_p=0.6, seed=seed) for seed in range(12)])
check(apart, [SamplingParams(min_p=0.1, seed=seed) for seed in range(12)])
print("the same")
"""

# The first share is so small that some rows need more draws than there are launches for them.
SPECIAL = """
import torch
from tandem.engine.device.sampler import sample_on_device
from tandem.engine.device.triton_sampler import draw_rows
from tandem.engine.output import best_of
from tandem.engine.step import Draw
from tandem.request import SamplingParams
from tandem.sampling.sampler import choose
from tests.unit.engine.test_device_sampler import check_requests, draw_of

def found(logits, params, allowed=None):
    draws = {row: draw_of(each, 3) for row, each in enumerate(params)}
    best = best_of(logits)
    return sample_on_device(logits, best, draws, best, allowed, draw_rows).tokens.tolist()

nucleus = [SamplingParams(top_p=0.001, seed=seed) for seed in range(10)]
logits = torch.randn(10, 1003, generator=torch.Generator().manual_seed(1)) * 0.01
assert found(logits, nucleus) == [choose(row.numpy(), each, 3).token_id for row, each in zip(logits, nucleus)]

kinds = [SamplingParams(temperature=0.5), SamplingParams(top_p=0.9), SamplingParams(top_k=5, top_p=0.5),
         SamplingParams(min_p=0.1)]
for value in (torch.nan, torch.inf):
    logits = torch.zeros(4, 300)
    logits[:, 7] = value
    assert found(logits, kinds) == 4 * [-1]
    assert found(torch.full((4, 300), value), kinds) == 4 * [-1]
none = torch.zeros(300, dtype=torch.bool).numpy()
assert found(torch.zeros(4, 300), kinds, {row: none for row in range(4)}) == 4 * [0]
one = none.copy()
one[299] = True
assert found(torch.zeros(4, 300), kinds, {row: one for row in range(4)}) == 4 * [299]

check_requests(3, draw_rows)
print("the same")
"""


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("count", "vocab", "block", "together"),
    [
        (25, 300, 2048, 25),
        (10, 1003, 512, 10),
        (4, 5003, 2048, 1),
        pytest.param(300, 300, 2048, 70, marks=pytest.mark.slow),
        pytest.param(100, 1003, 512, 70, marks=pytest.mark.slow),
        pytest.param(40, 5003, 1024, 20, marks=pytest.mark.slow),
    ],
)
def test_rows_of_all_kinds_draw_what_the_host_draws(count: int, vocab: int, block: int, together: int) -> None:
    assert interpreted(AS_THE_HOST, *map(str, (count, vocab, block, together))) == "the same\n"


@NEEDS_TRITON
def test_edges_are_those_of_the_host_with_equal_logits_and_unlike_chunks() -> None:
    assert interpreted(EDGES) == "the same\n"


@NEEDS_TRITON
def test_many_draws_and_rows_without_numbers_end() -> None:
    assert interpreted(SPECIAL) == "the same\n"


def test_wrong_and_unable_ways_to_draw_are_found() -> None:
    def first(draws: Sequence[Draw], columns: Tensor, logits: Tensor) -> Tensor:
        return torch.zeros(len(draws), dtype=torch.int64)

    def unable(draws: Sequence[Draw], columns: Tensor, logits: Tensor) -> Tensor:
        raise RuntimeError("no C compiler")

    assert "gives token 0, not" in str(draw_error(first, CPU))
    assert draw_error(unable, CPU) == "RuntimeError: no C compiler"
    assert choose_draw_rows(CPU, 300) is None


def test_every_row_of_a_step_is_drawn_in_the_chosen_way() -> None:
    """Those that top-k limits last, as `DrawRows` wants them, and truncation that changes nothing is left out."""
    seen: list[tuple[int, float]] = []

    def watch(draws: Sequence[Draw], columns: Tensor, logits: Tensor) -> Tensor:
        seen.extend((draw.top_k, draw.top_p) for draw in draws)
        return torch.arange(len(draws)) + 10

    def tokens(*kinds: tuple[float, int, float], draw_rows: DrawRows) -> list[int]:
        draws = {
            row: Draw(1, 2, temperature, top_k, top_p, 0.0) for row, (temperature, top_k, top_p) in enumerate(kinds)
        }
        best = torch.zeros(len(kinds), dtype=torch.int64)
        found: list[int] = sample_on_device(
            torch.zeros(len(kinds), 300), best, draws, best, draw_rows=draw_rows
        ).tokens.tolist()
        return found

    given = [(0.5, 20, 0.9), (0.5, 0, 0.9), (0.0, 20, 0.9), (0.5, 300, 1.0), (0.5, 299, 1.0)]
    assert tokens(*given, draw_rows=watch) == [13, 12, 10, 11, 14]
    assert seen == [(0, 1.0), (0, 1.0), (0, 0.9), (20, 0.9), (299, 1.0)]
