"""FlashInfer behind `PlannedKernel`: what we plan is enough to compute a step's attention, window by window.

The library needs a GPU. Its stand-in computes from the plan alone, by the library's documentation of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.attention.paged_check import kernel_error, plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.factory import Rank
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import AttentionParams
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import write_family

CPU = torch.device("cpu")
LAYOUT = KvPoolLayout(num_blocks=8, layers=1, kv_heads=2, block_tokens=16, head_dim=16, dtype="float32")
TERMS = AttentionParams(heads=6, scale=0.2, softcap=None, windows=(None, 24))
NAME = "tandem.engine.attention.flashinfer_attention"


class BatchPrefillWithPagedKVCacheWrapper:
    """Parameters by the names, in the order and with the defaults of FlashInfer 0.7."""

    plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"  # pages [kv_heads, page_size, head_dim]

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        on_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)  # on a GPU it would have to wait for them
        assert all(each.dtype == torch.int32 and each.device == CPU for each in (*on_host, paged_kv_indices))
        assert causal
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        type(self).plans += 1
        self._sequences = [
            (
                slice(*qo_indptr[n : n + 2].tolist()),
                paged_kv_indices[slice(*paged_kv_indptr[n : n + 2].tolist())].long(),
            )
            for n in range(len(paged_kv_last_page_len))
        ]
        self._last = paged_kv_last_page_len.tolist()
        self._sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._window = window_left
        self._dtypes = (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, dims, page = self._sizes
        assert (q.dtype, paged_kv_cache[0].dtype) == self._dtypes
        assert all(each.shape[1:] == (kv_heads, page, dims) for each in paged_kv_cache)
        out = torch.empty_like(q)
        for (rows, pages), last in zip(self._sequences, self._last, strict=True):
            length = (len(pages) - 1) * page + last
            keys, values = (each[pages].transpose(1, 2).flatten(0, 1)[:length] for each in paged_kv_cache)
            queries = q[rows]
            back = torch.arange(length - len(queries), length)[:, None] - torch.arange(length)
            unseen = (back < 0) | ((back > self._window) if self._window >= 0 else (back < 0))
            for head in range(heads):
                of = head // (heads // kv_heads)
                scores = (queries[:, head].float() @ keys[:, of].float().T * self._scale).masked_fill(
                    unseen, -torch.inf
                )
                out[rows, head] = (scores.softmax(dim=-1) @ values[:, of].float()).to(q.dtype)
        return out


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module, over the stand-in."""
    library: Any = ModuleType("flashinfer")
    library.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    BatchPrefillWithPagedKVCacheWrapper.plans = 0
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("page", [8, 16, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_its_plan_is_enough_for_every_batch_of_the_check(vendor: Any, page: int, kv_heads: int) -> None:
    layout = replace(LAYOUT, block_tokens=page, kv_heads=kv_heads)
    assert (
        kernel_error(vendor.FlashInferAttention(layout, TERMS, torch.float32, CPU), layout, TERMS, torch.float32, CPU)
        is None
    )


def test_a_wrong_plan_is_found(vendor: Any) -> None:
    other = replace(TERMS, scale=1.0)
    planned = vendor.FlashInferAttention(LAYOUT, other, torch.float32, CPU)
    assert "differ" in str(kernel_error(planned, LAYOUT, TERMS, torch.float32, CPU))


def tokens_of(rank: Rank) -> dict[str, list[int]]:
    driver = EngineDriver(rank.engine)
    choose = random.Random(1)
    for number in range(6):
        sampling = SamplingParams(temperature=0.0, max_tokens=choose.randrange(3, 20))
        driver.add(f"r{number}", random_prompt(choose.randrange(2, 90), 300, number), sampling)
    driver.run()
    assert driver.at_rest()
    return driver.tokens


@pytest.mark.parametrize("records", [True, False])
def test_prompts_of_a_model_with_windows_give_the_same_tokens(vendor: Any, records: bool, tmp_path: Path) -> None:
    model = write_family(tmp_path / "mistral", "mistral")
    settings: dict[str, Any] = {"kernels": "torch", "max_step_tokens": 64, "max_running_requests": 4}
    plain = single_rank(model, tmp_path / "plain", paged=PagedPath(plain_attention, None), **settings)
    expected = tokens_of(plain)
    terms = plain.runner._model.attention
    assert any(terms.windows)
    recorder = EagerRecorder() if records else None
    planned = vendor.FlashInferAttention(plain.layout, terms, torch.float32, CPU)
    ours = single_rank(model, tmp_path / "ours", paged=PagedPath(plain_attention, recorder, planned), **settings)
    BatchPrefillWithPagedKVCacheWrapper.plans = 0
    assert tokens_of(ours) == expected
    plans = BatchPrefillWithPagedKVCacheWrapper.plans
    assert plans >= 12
    if records:  # decode steps plan nothing
        assert plans < 60


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs the extra tandem-serve[cuda]")
def test_the_library_takes_what_the_stand_in_takes() -> None:
    theirs: Any = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        known = inspect.signature(getattr(theirs, name)).parameters
        used = inspect.signature(getattr(BatchPrefillWithPagedKVCacheWrapper, name)).parameters
        assert [*used] == [each for each in known if each in used]
        assert all(
            used[each].default == known[each].default
            for each in used
            if used[each].kind is not inspect.Parameter.KEYWORD_ONLY
        )
