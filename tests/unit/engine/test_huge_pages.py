"""Memory for weights in large pages: what is put there stays, and models share what they share elsewhere."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from tandem.native.huge_pages import PAGE_BYTES, REGION_BYTES, HugePages


def test_tensors_keep_their_values_beside_each_other_and_after_their_maker() -> None:
    pages, rng = HugePages(), torch.Generator().manual_seed(1)
    sizes = [1, 7, 100, PAGE_BYTES // 4, 5]
    made = [torch.randn(size, generator=rng) for size in sizes]
    kept = [pages.keep(each) for each in made]
    own = pages.empty(3, torch.int8).fill_(7)
    del pages
    gc.collect()
    assert all(torch.equal(one, other) for one, other in zip(kept, made, strict=True))
    assert own.tolist() == [7, 7, 7]
    assert all(each.data_ptr() % 64 == 0 for each in kept)
    assert kept[0].data_ptr() % PAGE_BYTES == 0


def test_what_is_there_already_is_not_copied_again() -> None:
    pages = HugePages()
    kept = pages.keep(torch.arange(12).view(3, 4).t())
    assert kept.is_contiguous()
    assert kept.shape == (4, 3)
    assert pages.keep(kept).data_ptr() == kept.data_ptr()


def test_a_tensor_larger_than_a_region_gets_its_own() -> None:
    pages = HugePages()
    small, large = pages.empty(1, torch.uint8), pages.empty(REGION_BYTES + 1, torch.uint8)
    large[-1] = small[0] = 3
    assert large.numel() == REGION_BYTES + 1
    assert (int(small), int(large[-1])) == (3, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' huge pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    kept = HugePages().keep(torch.ones(PAGE_BYTES))
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    ours = False
    for line in lines:
        if "-" in (span := line.split()[0]) and ":" not in span:
            first, end = (int(each, 16) for each in span.split("-"))
            ours = first <= kept.data_ptr() < end
        if ours and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    pytest.skip("this kernel does not tell a mapping's flags")
