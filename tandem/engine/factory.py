"""Builds one rank of a worker: model shard, KV pool, runner, and on rank 0 the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.checkpoint.model_config import ModelConfig
from tandem.config.spec import EngineSpec
from tandem.engine.api import KvExporter
from tandem.engine.attention.kernels import choose_kernels, choose_matrices
from tandem.engine.attention.paged_kernels import PagedPath, choose_paged_path
from tandem.engine.decode_graphs import DecodeGraphs
from tandem.engine.engine import Engine
from tandem.engine.host_pool import HostPool, host_slots
from tandem.engine.kv_pool import DTYPES, KvPool, pool_layout
from tandem.engine.output import Launched
from tandem.engine.runner import ModelRunner
from tandem.engine.step import HEARTBEAT
from tandem.engine.tp_group import TpGroup
from tandem.errors import ConfigError
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.host_tier import HostTier
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.checkpoint import Checkpoint
from tandem.model.parallel import TensorParallel
from tandem.model.weights import load_model
from tandem.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, ready to run. Only rank 0 has a `leader`."""

    config: ModelConfig
    layout: KvPoolLayout
    pool: KvPool
    max_model_tokens: int
    runner: ModelRunner
    group: TpGroup | None
    leader: Engine | None

    @property
    def engine(self) -> Engine:
        if self.leader is None:
            raise ConfigError("only rank 0 of a worker has an engine", field="rank")
        return self.leader

    def follow(self) -> None:
        """Runs the leader's steps until it stops. Raises WorkerLost if the leader is gone or silent."""
        if self.group is None:
            raise ConfigError("a worker of one rank has no leader to follow", field="rank")
        last: Launched | None = None
        for step in self.group.steps():
            if step != HEARTBEAT:
                before, last = last, self.runner.launch(step)
                if before is not None:
                    before.wait()


def check_checkpoint(model_dir: Path) -> None:
    """Reads the headers of the weight files. Raises CheckpointError naming a missing or truncated file."""
    with Checkpoint.open(model_dir):
        pass


def build_rank(
    model_dir: Path,
    spec: EngineSpec,
    *,
    rank: int,
    size: int,
    rendezvous_file: Path,
    exporter: KvExporter,
    paged: PagedPath | None = None,
) -> Rank:
    """`paged` None: choose it by the device. Raises CheckpointError, ConfigError, InsufficientMemory."""
    torch.set_num_threads(spec.threads_per_rank)
    device = torch.device(spec.device)
    config = ModelConfig.load(model_dir)
    config.check_tp(size)
    max_model_tokens = min(spec.max_model_tokens or config.max_position_tokens, config.max_position_tokens)
    if spec.kv_dtype == "fp8" and config.traits.qkv_bias and not config.traits.qk_norm:
        logger.warning(
            "engine.kv_dtype: fp8 may be too coarse for keys with a bias; compare outputs with kv_dtype auto"
        )
    layout = pool_layout(spec, layers=config.layers, kv_heads=config.rank_kv_heads(size), head_dim=config.head_dim)
    slots = host_slots(spec, layout)
    kernels = choose_kernels(spec, layout, size)
    group = TpGroup(rendezvous_file, rank, size, device) if size > 1 else None
    tp = TensorParallel(rank, size, group.collectives if group else None)
    matrix = choose_matrices(spec, kernels)
    model = load_model(model_dir, config, tp, device, DTYPES[spec.dtype], max_tokens=max_model_tokens, matrix=matrix)
    if matrix.is_native:
        torch.set_num_threads(1)  # torch's threads would spin on cores of the kernels' threads
    paged = paged or choose_paged_path(model, layout, DTYPES[spec.dtype], device)
    pool = KvPool(layout, device, spare=paged is not None)
    host = HostPool(slots, pool) if slots else None
    graphs = None
    if paged is not None and paged.recorder is not None:
        graphs = DecodeGraphs(
            model, pool.with_spare, paged.kernel, paged.recorder,
            most_requests=spec.max_running_requests, most_tokens=max_model_tokens,
        )  # fmt: skip
        graphs.record_all()
    runner = ModelRunner(
        model, pool, exporter, device, kernels, host, group.barrier if group else None,
        paged=paged.kernel if paged else None, graphs=graphs,
    )  # fmt: skip
    leader = None
    if rank == 0:
        scheduler = Scheduler(
            BlockPool(layout.num_blocks, HostTier(slots) if slots else None),
            block_tokens=spec.block_tokens,
            max_running_requests=spec.max_running_requests,
            max_step_tokens=spec.max_step_tokens,
            max_model_tokens=max_model_tokens,
            window_tokens=config.traits.widest_window,
        )
        leader = Engine(runner, scheduler, config.vocab_size, group.send_step if group else None)
    return Rank(config, layout, pool, max_model_tokens, runner, group, leader)
