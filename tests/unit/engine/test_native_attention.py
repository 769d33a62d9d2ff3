"""The native kernels attend as torch does, and to each token the same whatever shares its step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.engine.attention.attention import StepAttention
from tandem.engine.attention.native_attention import NativeStepAttention
from tandem.engine.kv_pool import DTYPES
from tandem.engine.step import SequenceStep
from tandem.kvcache.layout import KvPoolLayout, cell_width
from tandem.model.decoder import AttentionParams
from tandem.native.library import CELL_KINDS, Kernels

# (tokens in the cache, tokens in the step): a chunk behind a cached prefix, decodes, a new prompt, the start of a tile
REQUESTS = ((37, 60), (130, 1), (0, 70), (64, 1), (63, 2), (0, 1))
# query heads, KV heads, head_dim, block_tokens
SHAPES = ((9, 3, 64, 16), (4, 4, 24, 8), (6, 1, 40, 24), (128, 1, 8, 16), (2, 2, 128, 32))
WINDOWS_AND_CAPS = ((None, None), (50, None), (None, 5.0), (7, 30.0))
Shape = tuple[int, int, int, int]
LAYER = 1


class Attended:
    """A pool with the requests' prefixes in it and what is no number everywhere else."""

    def __init__(self, shape: Shape, window: int | None, softcap: float | None, dtype: str = "float32") -> None:
        heads, kv_heads, self.dim, size = shape
        needed = [-(-(start + count) // size) for start, count in REQUESTS]
        width = self.dim + cell_width(0, dtype)
        self.layout = KvPoolLayout(sum(needed) + 3, 2, kv_heads, size, width, dtype)
        self.terms = AttentionParams(heads, self.dim**-0.5, softcap, (window,) * 2)
        self.draw = torch.Generator().manual_seed(3)
        blocks = torch.randperm(self.layout.num_blocks, generator=self.draw).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        self.steps = [self.step(number, start, count) for number, (start, count) in enumerate(REQUESTS)]
        self.prefixes = [self.step(number, 0, start) for number, (start, _) in enumerate(REQUESTS) if start]
        self.rows = [self.random(sum(len(each.token_ids) for each in steps)) for steps in (self.prefixes, self.steps)]

    def step(self, number: int, start: int, count: int) -> SequenceStep:
        return SequenceStep(token_ids=[0] * count, start=start, blocks=self.tables[number], samples=1)

    def random(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.terms.heads, self.layout.kv_heads, self.layout.kv_heads)
        q, k, v = (torch.randn(tokens, each, self.dim, generator=self.draw) for each in heads)
        return q, k, v

    def pool(self, filled_with: float) -> Tensor:
        dtype = DTYPES[self.layout.dtype]
        return torch.full(self.layout.shape, filled_with if dtype.is_floating_point else -1, dtype=dtype)

    def by_torch(self) -> Tensor:
        pool = self.pool(0.0)
        for steps, rows in zip((self.prefixes, self.steps), self.rows, strict=True):
            out = StepAttention(pool, self.layout, steps, self.terms)(LAYER, *rows)
        return out

    def by_kernels(self, pool: Tensor) -> Tensor:
        kernels = Kernels(threads=2)
        for steps, rows in zip((self.prefixes, self.steps), self.rows, strict=True):
            out = NativeStepAttention(kernels, pool, self.layout, steps, self.terms)(LAYER, *rows)
        return out

    def alone(self, pool: Tensor) -> Tensor:
        """Token by token, each in a step of its own, over a pool that was filled."""
        kernels = Kernels(threads=1)
        found: list[torch.Tensor] = []
        for number, (start, count) in enumerate(REQUESTS):
            for place in range(start, start + count):
                row = [each[len(found) : len(found) + 1] for each in self.rows[1]]
                attend = NativeStepAttention(kernels, pool, self.layout, [self.step(number, place, 1)], self.terms)
                found.append(attend(LAYER, *row))
        return torch.cat(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_CAPS)
def test_a_mixed_step_attends_as_torch_does(shape: Shape, window: int | None, softcap: float | None) -> None:
    attended = Attended(shape, window, softcap)
    torch.testing.assert_close(attended.by_kernels(attended.pool(torch.nan)), attended.by_torch(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3"])
@pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_CAPS)
def test_a_token_attends_alike_alone_and_in_a_mixed_step(
    shape: Shape, dtype: str, window: int | None, softcap: float | None
) -> None:
    attended = Attended(shape, window, softcap, dtype)
    pool = attended.pool(torch.nan)
    together = attended.by_kernels(pool)
    assert together.isfinite().all()
    assert torch.equal(together, attended.alone(pool))


@pytest.mark.parametrize("dtype", CELL_KINDS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [1, 2])
def test_a_value_that_is_not_finite_shows_in_all_that_see_it(dtype: str, broken: float, place: int) -> None:
    """In a key or a value, in each format of a pool."""
    attended = Attended(SHAPES[0], None, None, dtype)
    first = attended.by_kernels(attended.pool(0.0))
    assert first.isfinite().all()
    attended.rows[1][place][0, 0, 5] = broken
    got = attended.by_kernels(attended.pool(0.0))
    assert not got[0].isfinite().all()
    assert torch.equal(got.isfinite().all(dim=1)[-REQUESTS[-1][1] :], torch.ones(REQUESTS[-1][1], dtype=torch.bool))
