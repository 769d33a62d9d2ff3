"""Threads share a kernel's parts: each part runs once, for any number of threads and callers, also after a fork. They
find the best of each row. Vectors of both widths give the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.engine.output import best_of
from tandem.errors import ConfigError
from tandem.model.matrices import quantised_int4, quantised_int8
from tandem.native.library import Kernels

ROUNDS = 300


@pytest.fixture(scope="module")
def product() -> Callable[[Kernels], Tensor]:
    """Of sizes that come to dozens of parts."""
    draw = torch.Generator().manual_seed(3)
    values = torch.randint(-127, 128, (700, 66), generator=draw, dtype=torch.int8)
    x, scales = torch.randn(300, 66, generator=draw), torch.rand(700, generator=draw)

    def multiply(kernels: Kernels) -> Tensor:
        return kernels.linear_int8(x, kernels.pack_int8(values, scales), None)

    return multiply


@pytest.fixture(scope="module", autouse=True)
def _kernels_there() -> None:
    try:
        Kernels(threads=1)
    except ConfigError as error:
        pytest.skip(str(error))


def test_any_number_of_threads_gives_the_same_bits(product: Callable[[Kernels], Tensor]) -> None:
    alone = product(Kernels(threads=1))
    for threads in (2, 3, 8, 2):
        kernels = Kernels(threads)
        for _ in range(ROUNDS // 10):
            assert torch.equal(product(kernels), alone)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (17, 31), (48, 64), (100, 577)])
def test_quantised_products_have_the_same_bits_in_vectors_of_both_widths(outputs: int, inputs: int) -> None:
    narrow, wide = (Kernels(threads=2, lanes=lanes) for lanes in (8, 16))
    draw = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs, generator=draw), torch.randn(outputs, generator=draw)
    int8, int4 = quantised_int8(weight), quantised_int4(weight)
    for rows in (1, 5, 12, 13, 100):
        x = torch.randn(rows, inputs, generator=draw)
        for used in (None, narrow.padded_bias(bias)):
            eight = [each.linear_int8(x, each.pack_int8(*int8), used) for each in (narrow, wide)]
            four = [each.linear_int4(x, each.pack_int4(*int4), used) for each in (narrow, wide)]
            assert torch.equal(*eight)
            assert torch.equal(*four)


def test_callers_at_the_same_time_do_not_disturb_each_other(product: Callable[[Kernels], Tensor]) -> None:
    alone = product(Kernels(threads=1))
    wrong: list[int] = []

    def call(number: int) -> None:
        kernels = Kernels(threads=2 + number % 2)
        wrong.extend(number for _ in range(ROUNDS) if not torch.equal(product(kernels), alone))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORK = """
import os
import sys
import torch
from tandem.native.library import Kernels

kernels = Kernels(threads=2)
x, values, scales = torch.randn(300, 66), torch.randint(-127, 128, (700, 66), dtype=torch.int8), torch.rand(700)
matrix = kernels.pack_int8(values, scales)
before = kernels.linear_int8(x, matrix, None)
child = os.fork()
if child == 0:
    alone = len(os.listdir("/proc/self/task"))
    same = all(torch.equal(kernels.linear_int8(x, matrix, None), before) for _ in range(30))
    os._exit(0 if same and alone == 1 and len(os.listdir("/proc/self/task")) == 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_helpers_of_its_own() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, timeout=60, check=False)
    assert done.returncode == 0


def test_helpers_leave_signals_to_the_interpreter(product: Callable[[Kernels], Tensor]) -> None:
    before = {int(task) for task in os.listdir("/proc/self/task")}
    product(Kernels(threads=12))
    hired = {int(task) for task in os.listdir("/proc/self/task")} - before
    assert hired
    for task in hired:
        with open(f"/proc/self/task/{task}/status") as lines:
            blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        assert blocked >> (signal.SIGTERM - 1) & 1
        assert blocked >> (signal.SIGCHLD - 1) & 1


def test_the_best_of_a_row_is_torchs_or_none() -> None:
    rows = torch.randn(40, 1003, generator=torch.Generator().manual_seed(1))
    rows[0, [77, 900]] = 9.0
    rows[1, [5, 1002]] = 9.0
    rows[2, 1002] = 9.0
    rows[3, 8], rows[4, 1001] = torch.nan, torch.nan
    rows[5, 8], rows[6, 1001] = torch.inf, torch.inf
    rows[7], rows[8], rows[9, :1002] = -torch.inf, torch.nan, -torch.inf
    best = Kernels(threads=2).best(rows)
    assert torch.equal(best, best_of(rows))
    assert best[:10].tolist() == [77, 5, 1002, -1, -1, -1, -1, -1, -1, 1002]
