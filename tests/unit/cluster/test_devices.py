"""The book of GPUs, and the names of GPUs in processes that see a list of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.devices import DeviceBook, device_of, narrowed
from tandem.errors import ConfigError


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "device"),
    [
        ([], None, "cpu"),
        ([], "0,1", "cpu"),
        (["1"], None, "cuda:1"),
        (["5"], "4,5", "cuda:1"),
        (["GPU-b"], "GPU-a, GPU-b", "cuda:1"),
        (["3"], "3", "cuda:0"),  # a Ray that hides the other GPUs all the same
    ],
)
def test_rays_gpu_is_named_by_its_place_in_the_visible_list(
    gpu_ids: list[str], visible: str | None, device: str
) -> None:
    assert device_of(gpu_ids, visible) == device


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "text"),
    [(["0", "1"], None, "expected one GPU for a rank, got 0, 1"), (["7"], "0,1", "GPU 7, which the rank does not see")],
)
def test_a_gpu_that_cannot_be_named_is_refused(gpu_ids: list[str], visible: str | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        device_of(gpu_ids, visible)


@pytest.mark.parametrize(("visible", "left"), [(None, "2,0"), ("GPU-a,GPU-b,GPU-c", "GPU-c,GPU-a"), ("4, 5, 7", "7,4")])
def test_a_narrower_list_keeps_the_names_of_the_former(visible: str | None, left: str) -> None:
    assert narrowed((2, 0), visible) == left


def test_the_gpus_with_the_most_free_share_come_first() -> None:
    book = DeviceBook((0, 1, 2))
    assert book.assign("a", 1, 0.5, "cuda") == ("cuda:0",)
    assert book.assign("b", 2, 0.25, "cuda") == ("cuda:1", "cuda:2")
    assert book.assign("c", 1, 0.5, "cuda") == ("cuda:1",)
    assert book.assign("d", 3, 0.25, "cuda") == ("cuda:0", "cuda:1", "cuda:2")


def test_a_pinned_gpu_is_given_and_no_other() -> None:
    book = DeviceBook((0, 1))
    assert book.assign("a", 1, 1.0, "cuda:1") == ("cuda:1",)
    with pytest.raises(ConfigError, match=r"b needs a share of 1 GPU \(engine\.device cuda:1.*cuda:0: 1, cuda:1: 0"):
        book.assign("b", 1, 0.1, "cuda:1")
    with pytest.raises(ConfigError, match="cuda:5"):
        book.assign("c", 1, 0.1, "cuda:5")


def test_a_released_share_is_free_again_and_a_refused_one_takes_nothing() -> None:
    book = DeviceBook((0,))
    book.assign("a", 1, 0.6, "cuda")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"device_share 0\.6.*cuda:0: 0\.4"):
            book.assign("b", 1, 0.6, "cuda")
    book.assign("c", 1, 0.4, "cuda")
    book.release("a")
    assert book.assign("b", 1, 0.6, "cuda") == ("cuda:0",)


def test_a_group_may_hold_a_gpu_that_is_not_seen_any_more() -> None:
    book = DeviceBook((0,))
    book.take("a", ("cuda:1",), 1.0)
    assert book.of("a") == ("cuda:1",)
    assert book.assign("b", 1, 1.0, "cuda") == ("cuda:0",)
    with pytest.raises(ConfigError, match=r"cuda:0: 0, cuda:1: -1"):
        book.assign("c", 1, 1.0, "cuda:1")


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0.1, 0.3, 0.45, 0.5, 1.0)), st.booleans()), max_size=20),
)
def test_ranks_of_a_worker_never_share_a_gpu_and_no_gpu_is_given_twice(
    gpus: int, steps: list[tuple[int, float, bool]]
) -> None:
    book, used, groups = DeviceBook(range(gpus)), [0.0] * gpus, list[tuple[str, tuple[str, ...], float]]()
    for number, (ranks, share, leaves) in enumerate(steps):
        try:
            given_devices = book.assign(str(number), ranks, share, "cuda")
        except ConfigError:
            assert sum(each + share <= 1.0001 for each in used) < ranks
            continue
        assert len(set(given_devices)) == ranks
        groups.append((str(number), given_devices, share))
        if leaves:
            name, *_ = groups.pop(0)
            book.release(name)
        used = [sum(part for _, names, part in groups if f"cuda:{each}" in names) for each in range(gpus)]
        assert max(used) <= 1.0001
