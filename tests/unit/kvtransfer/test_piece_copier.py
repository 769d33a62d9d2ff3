"""Triton's copies and digests of pieces are torch's, and a kernel that is wrong, hangs or faults is not taken."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvtransfer.causes import DeviceLost, HandoffFault
from kvtransfer.connection.handshake import MULTILINEAR
from kvtransfer.pool import copier_choice
from kvtransfer.pool.copier_check import copier_error
from kvtransfer.pool.copier_choice import choose_copier, error_apart, error_of
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool, Pending, device_errors
from kvtransfer.pool.piece_copier import Place
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.pool.slots import Slot, Slots
from kvtransfer.session.piece import MAX_DEVICE_PIECE_BYTES
from kvtransfer.transports.mapped import DeviceAccess, make_access
from kvtransfer.transports.threads import AgentThreads, LinkThread
from tandem.kvcache.layout import KvPoolLayout

CPU = torch.device("cpu")
LAYOUT = KvPoolLayout(num_blocks=24, layers=3, kv_heads=4, block_tokens=4, head_dim=8, dtype="bfloat16")
SPAN = PoolSpan((3, 1), 4, 0, 3, 0, 4)
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for GPUs")


@dataclass
class Launched:
    digest: int


class Careless:
    """Copies nothing, and calls that a digest of 5."""

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> Launched:
        return Launched(5)

    def release(self, launch: Launched) -> None:
        """Has nothing to release."""


class Torch(Careless):
    """By torch's operations, with a digest that `changed` makes of the right one."""

    def __init__(self, changed: Callable[[int], int] = lambda digest: digest) -> None:
        self._changed = changed

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> Launched:
        source = DevicePool(read.layout, read.words.view(torch.uint8))
        if write is not None:
            DevicePool(write.layout, write.words.view(torch.uint8)).copy_from(source, read.span, write.span, None)
        return Launched(0 if keys is None else self._changed(source.digest(read.span, keys)))


class Failing(Careless):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> Launched:
        raise self._error


def test_a_wrong_one_is_found() -> None:
    assert copier_error(Torch(), LAYOUT, CPU) is None
    assert copier_error(Careless(), LAYOUT, CPU) == "a copied piece has other bytes than its source"
    assert str(copier_error(Torch(lambda digest: digest ^ 1), LAYOUT, CPU)).startswith("the digest of a piece is 0x")


# --- in another process ------------------------------------------------------------------------------------------


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_check_that_ends_well_says_nothing() -> None:
    assert error_of(python("print('compiling')"), 60.0) is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('it is\\nwrong')", "its check ended with 1: wrong"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "its check ended with -6: without a word"),
        (
            "raise RuntimeError('an illegal memory access')",
            "its check ended with 1: RuntimeError: an illegal memory access",
        ),
    ],
)
def test_a_check_that_dies_says_why(code: str, reason: str) -> None:
    assert error_of(python(code), 60.0) == reason


def test_a_check_that_hangs_is_ended_in_time_with_all_that_it_started() -> None:
    started_s = time.monotonic()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert error_of(python(code), 0.5) == "its check did not end within 0.5 s"
    assert time.monotonic() - started_s < 5.0


def test_a_check_that_cannot_start_says_why() -> None:
    assert str(error_of(("/nowhere",), 1.0)).startswith("its check did not start: ")


@NEEDS_TRITON
def test_a_kernel_whose_check_fails_never_runs_here(caplog: pytest.LogCaptureFixture) -> None:
    """One that faults would end this process again and again."""
    with caplog.at_level(logging.WARNING):
        assert choose_copier(LAYOUT, CPU, lambda layout, device: "its check ended with -6: fault") is None
    assert "its check ended with -6: fault" in caplog.text
    assert "kvtransfer.pool.triton_copy" not in sys.modules


@NEEDS_TRITON
def test_the_check_runs_the_kernel_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), *sys.path]))
    assert error_apart(LAYOUT, CPU) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert str(error_apart(LAYOUT, CPU)).startswith("its check ended with 1: "), "no kernel runs on a CPU"
    assert copier_choice.CHECK_LIMIT_S <= 60.0


# --- in pools and links ------------------------------------------------------------------------------------------


class Event:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Has ended."""


class StartedPool(DevicePool):
    """Starts pieces as on a GPU."""

    def start(self, work: Callable[[], None]) -> Event:
        with device_errors():
            work()
        return Event()


def pools(kind: type[DevicePool] = DevicePool) -> tuple[DevicePool, DevicePool]:
    local, peer = (kind(LAYOUT, torch.zeros(LAYOUT.pool_bytes, dtype=torch.uint8)) for _ in range(2))
    return local, peer


def test_a_piece_is_copied_and_digested_by_its_launch() -> None:
    local, peer = pools(StartedPool)
    peer.words.random_()
    keys = local.make_keys(3)
    local._copier = Torch()
    assert local.copy_from(peer, SPAN, SPAN, keys) == peer.digest(SPAN, keys) == local.digest(SPAN, keys)


def test_what_cannot_be_launched_costs_the_piece_and_no_more() -> None:
    """Triton's errors are plain exceptions, which would leave the piece's blocks leased."""

    class OutOfResources(Exception):
        pass

    local, peer = pools(StartedPool)
    local._copier = Failing(OutOfResources("shared memory"))
    with pytest.raises(HandoffFault, match="OutOfResources: shared memory"):
        local.start_copy(peer, SPAN, SPAN, None)
    local._copier = Failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceLost):
        local.start_digest(SPAN, local.make_keys(1))


def test_only_what_is_one_launch_goes_in_the_largest_pieces() -> None:
    """Torch's operations gather a piece in memory of its size."""
    local, peer = pools()
    thread = LinkThread("link", AgentThreads())
    assert make_access(thread, local, peer, MULTILINEAR, 1).max_piece_bytes is None
    local._copier = Careless()
    assert make_access(thread, local, peer, MULTILINEAR, 1).max_piece_bytes == MAX_DEVICE_PIECE_BYTES
    peer.device = torch.device("cuda", 1)
    assert DeviceAccess(thread, local, local.make_keys(1), peer).max_piece_bytes is None


@pytest.mark.parametrize(("offset", "launches"), [(16, True), (8, False)])
def test_no_kernel_is_compiled_for_pools_of_another_alignment(offset: int, launches: bool) -> None:
    """It would be on a link that pieces wait for."""
    local, _ = pools()
    odd = DevicePool(LAYOUT, torch.zeros(LAYOUT.pool_bytes + 16, dtype=torch.uint8)[offset:][: LAYOUT.pool_bytes])
    local._copier = odd._copier = Careless()
    assert local.launches_from(None)
    assert local.launches_from(odd) is launches
    assert odd.launches_from(local) is launches
    assert odd.launches_from(None) is launches


def test_a_link_waits_for_the_kernels_only_so_long() -> None:
    local, peer = pools()
    thread = LinkThread("link", AgentThreads())
    local._is_chosen.clear()
    started_s = time.monotonic()
    assert make_access(thread, local, peer, MULTILINEAR, 1, wait_s=0.05).max_piece_bytes is None
    assert 0.05 <= time.monotonic() - started_s < 5.0
    threading.Timer(0.05, local.choose_kernels).start()
    assert local.await_kernels(30.0)


async def test_torchs_copies_are_reported_one_by_one() -> None:
    ends = threading.Semaphore(0)

    class Slow(DevicePool):
        def start_copy(self, source: DevicePool, read: PoolSpan, write: PoolSpan, keys: DigestKeys | None) -> Pending:
            assert ends.acquire(timeout=30.0)
            return super().start_copy(source, read, write, keys)

    local, peer = pools(Slow)
    access = make_access(LinkThread("link", AgentThreads()), local, peer, MULTILINEAR, 1)
    tasks = [asyncio.create_task(access.copy(SPAN, SPAN, 1 << 20, digests=False)) for _ in range(3)]
    try:
        for number, task in enumerate(tasks):
            ends.release()
            async with asyncio.timeout(5.0):
                await task
            assert not any(later.done() for later in tasks[number + 1 :])
    finally:
        ends.release(len(tasks))


def test_a_piece_without_memory_for_its_ids_costs_no_device() -> None:
    """A failed allocation of pinned memory is a plain RuntimeError of torch, as a lost device is."""

    def fail(capacity: int, device: torch.device) -> Slot:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    with pytest.raises(HandoffFault, match=r"CUDA error: out of memory$"):
        Slots(CPU, fail).take(1)


def test_the_memory_of_ended_pieces_is_used_again_if_it_is_large_enough() -> None:
    slots = Slots(CPU)
    first = slots.take(10)
    slots.give_back(first)
    large = slots.take(5000)
    assert len(large.view) >= 5000
    assert slots.take(1000) is first


INTERPRETED = """
import random
import torch
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.pool.copier_check import copier_error
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.pool.triton_copy import TritonCopier
from tandem.kvcache.layout import KvPoolLayout

cpu, draw = torch.device("cpu"), random.Random(0)
shapes = [
    (4, 8, "bfloat16"), (4, 8, "float32", True), (5, 12, "bfloat16"), (16, 96, "bfloat16"), (32, 128, "float32"),
    (16, 128, "float8_e4m3"),
]
for shape in shapes:
    layout = KvPoolLayout(24, 3, 4, *shape)
    print(copier_error(TritonCopier(cpu), layout, cpu))

layout = KvPoolLayout(24, 3, 4, 4, 8, "bfloat16")
copier, keys = TritonCopier(cpu, tile_words=64), DigestKeys(3, layout.head_bytes // 4, cpu)
orders = (tuple(range(9)), tuple(range(23, 1, -2)), (3, 4, 5, 9, 1), (7,), tuple(draw.sample(range(24), 24)))
for ids in orders:
    for tokens in (4, 1, 3):
        layer, head = draw.randrange(3), draw.randrange(4)
        layers, heads = draw.randint(1, 3 - layer), draw.randint(1, 4 - head)
        pools = [torch.randint(0, 256, (layout.pool_bytes,), dtype=torch.uint8) for _ in range(2)]
        source, target, expected = *(DevicePool(layout, pool) for pool in pools), DevicePool(layout, pools[1].clone())
        read = PoolSpan(ids, tokens, layer, layers, head, heads)
        write = PoolSpan(tuple(draw.sample(range(24), len(ids))), tokens, layer, layers, 4 - heads, heads)
        digest = expected.copy_from(source, read, write, keys)
        launch = copier.launch(source._place(read), target._place(write), keys)
        assert (launch.digest, torch.equal(target.words, expected.words)) == (digest, True), (read, write)
        copier.release(launch)
        launch = copier.launch(source._place(read), None, keys)
        assert launch.digest == digest == source.digest(read, keys), read
        copier.release(launch)
"""


@NEEDS_TRITON
def test_those_of_triton_are_right() -> None:
    """By Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("None\n" * 6, 0), done.stderr
