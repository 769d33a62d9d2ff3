"""Triton's copies and digests of pieces are torch's, and a kernel that is wrong is not taken."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from kvtransfer.connection.handshake import MULTILINEAR
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.pool.piece_copier import Place, copier_error
from kvtransfer.session.piece import MAX_DEVICE_PIECE_BYTES
from kvtransfer.transports.mapped import DeviceAccess, make_access
from kvtransfer.transports.threads import AgentThreads, LinkThread
from tandem.kvcache.layout import KvPoolLayout

CPU = torch.device("cpu")
LAYOUT = KvPoolLayout(num_blocks=24, layers=3, kv_heads=4, block_tokens=4, head_dim=8, dtype="bfloat16")


@dataclass
class Launched:
    digest: int


class Careless:
    """Copies nothing, and calls that a digest of 5."""

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> Launched:
        return Launched(5)

    def release(self, launch: Launched) -> None:
        """Has nothing to release."""


def test_a_wrong_one_is_found() -> None:
    assert copier_error(Careless(), LAYOUT, CPU) == "a copied piece has other bytes than its source"


def test_only_what_is_one_launch_goes_in_the_largest_pieces() -> None:
    """Torch's operations gather a piece in memory of its size."""
    local, peer = (DevicePool(LAYOUT, torch.zeros(LAYOUT.pool_bytes, dtype=torch.uint8)) for _ in range(2))
    thread = LinkThread("link", AgentThreads())
    assert make_access(thread, local, peer, MULTILINEAR, 1).max_piece_bytes is None
    local._copier = Careless()
    assert make_access(thread, local, peer, MULTILINEAR, 1).max_piece_bytes == MAX_DEVICE_PIECE_BYTES
    peer.device = torch.device("cuda", 1)
    assert DeviceAccess(thread, local, local.make_keys(1), peer).max_piece_bytes is None


INTERPRETED = """
import random
import torch
from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.pool.piece_copier import Place, copier_error
from kvtransfer.pool.pool import PoolSpan
from kvtransfer.pool.triton_copy import TritonCopier
from tandem.kvcache.layout import KvPoolLayout

cpu, draw = torch.device("cpu"), random.Random(0)
shapes = [(4, 8, "bfloat16"), (5, 12, "bfloat16"), (16, 96, "bfloat16"), (32, 128, "float32"), (16, 128, "float8_e4m3")]
for block_tokens, head_dim, dtype in shapes:
    layout = KvPoolLayout(24, 3, 4, block_tokens, head_dim, dtype)
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for GPUs")
def test_those_of_triton_are_right() -> None:
    """By Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("None\n" * 5, 0), done.stderr
