"""A rank with another engine than ours, whose KV is in a pool that the transfer agent moves."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from cluster.backends.rank_process import make_roles
from tandem.config.launch import WorkerLaunch
from tandem.engine.api import Engine, KvExporter
from tandem.engine.kv_pool import KvPool
from tandem.engine.step_work import WorkShape
from tandem.errors import WorkerLost
from tandem.kvcache.layout import KvPoolLayout
from tandem.testing.small_engine import SmallEngine
from worker.rank import EngineRank, main

BLOCKS = 64


@dataclass(frozen=True, slots=True)
class SmallRank:
    layout: KvPoolLayout
    pool: KvPool
    engine: Engine
    work_shape: WorkShape
    kv_heads: int = 1
    max_model_tokens: int = 512

    def follow(self) -> None:
        raise WorkerLost("this engine has one rank")

    def close(self) -> None:
        self.engine.close()


def build_small_rank(launch: WorkerLaunch, index: int, exporter: KvExporter) -> EngineRank:
    block_tokens = launch.engine.block_tokens
    layout = KvPoolLayout(BLOCKS, 1, 1, block_tokens, head_dim=2, dtype="float32", joined=True)
    pool = KvPool(layout, torch.device("cpu"))
    keys = pool.tensor[:, 0, 0, 0, :, 0].numpy()  # [block, token]
    cells = cast(Sequence[MutableSequence[float]], list(keys))
    engine = SmallEngine(BLOCKS, exporter, block_tokens=block_tokens, kv=cells)
    return SmallRank(layout, pool, engine, WorkShape(1, 1, 1, 1.0, 1.0))


if __name__ == "__main__":
    main(make_roles, "A rank with another engine.", build_small_rank)
