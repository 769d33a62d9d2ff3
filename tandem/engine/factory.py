"""Builds one rank of a worker: model shard, KV pool, runner, and on rank 0 the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tandem.checkpoint.model_config import ModelConfig, embeds_by_last_token
from tandem.config.engine import EngineSpec
from tandem.engine.allocation_failures import is_out_of_memory, leaves_device_unusable, lost_for_memory
from tandem.engine.api import Capability, KvExporter
from tandem.engine.attention.kernels import choose_kernels, choose_matrices
from tandem.engine.attention.paged_kernels import PagedPath, choose_paged_path
from tandem.engine.decode_graphs import DecodeGraphs
from tandem.engine.device.sampler import DrawRows
from tandem.engine.device.sampler_choice import choose_draw_rows
from tandem.engine.device_memory import CudaMemory, DeviceMemory, insufficient_memory, largest_steps, measured_budget
from tandem.engine.drafts.choose import Drafts, Target, choose_drafts
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.engine import TandemEngine
from tandem.engine.host_pool import HostPool, host_slots
from tandem.engine.kv_pool import DTYPES, KvPool, block_layout, pool_layout
from tandem.engine.output import Launched
from tandem.engine.runner import ModelRunner
from tandem.engine.step import HEARTBEAT, StepInput
from tandem.engine.step_work import WorkShape
from tandem.engine.tp_group import TpGroup
from tandem.errors import ConfigError, TandemError
from tandem.grammar.compiler import GrammarCompiler
from tandem.grammar.masks import Grammars
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.host_tier import HostTier
from tandem.kvcache.layout import DTYPE_BYTES, KvPoolLayout
from tandem.machine_memory import available_bytes
from tandem.model.checkpoint import Checkpoint
from tandem.model.decoder import Decoder
from tandem.model.parallel import TensorParallel
from tandem.model.weights import load_model
from tandem.scheduler.batching import BatchRule
from tandem.scheduler.prompt_limit import PromptLimit
from tandem.scheduler.scheduler import Scheduler

_QUANTISED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.625}  # per weight, including its share of the group's scales

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank, ready to run. Only rank 0 has a `leader`."""

    config: ModelConfig
    model: Decoder
    layout: KvPoolLayout
    pool: KvPool
    max_model_tokens: int
    work_shape: WorkShape
    runner: ModelRunner
    group: TpGroup | None
    leader: TandemEngine | None

    @property
    def kv_heads(self) -> int:
        return self.config.kv_heads

    @property
    def engine(self) -> TandemEngine:
        if self.leader is None:
            raise ConfigError("only rank 0 of a worker has an engine", field="rank")
        return self.leader

    def close(self) -> None:
        """The last call. Rank 0 tells the others to stop."""
        if self.leader is not None:
            self.leader.close()
        if self.group is not None:
            self.group.close()

    def follow(self) -> None:
        """Runs the leader's steps until it stops. A step that fails alike on all ranks is skipped: the leader ends the
        request that made it fail. Raises WorkerLost if the leader is gone or silent, or if a step runs out of memory or
        fails on this rank alone: the other ranks wait for this one, and its end ends them."""
        if self.group is None:
            raise ConfigError("a worker of one rank has no leader to follow", field="rank")
        last: Launched | None = None
        for step in self.group.steps():
            if step != HEARTBEAT:
                before, last = last, self._launched(step, self.group)
                if before is not None:
                    before.wait()

    def _launched(self, step: StepInput, group: TpGroup) -> Launched | None:
        try:
            return self.runner.launch(step)
        except TandemError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise lost_for_memory(error) from error
            if leaves_device_unusable(error, on_device=self.runner.samples_on_device):
                raise
            group.check_failed_alike()
            log.exception("a step failed on each rank")
            return None


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
    memory: DeviceMemory | None = None,
) -> Rank:
    """`paged`, `memory` None: chosen by the device. Raises CheckpointError, ConfigError, InsufficientMemory."""
    torch.set_num_threads(spec.threads_per_rank)
    device, dtype = torch.device(spec.device), DTYPES[spec.dtype]
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)
    config = ModelConfig.load(model_dir)
    config.check_tp(size)
    max_model_tokens = min(spec.max_model_tokens or config.max_position_tokens, config.max_position_tokens)
    if spec.kv_dtype == "fp8" and config.traits.qkv_bias and not config.traits.qk_norm:
        log.warning("engine.kv_dtype: fp8 may be too coarse for keys with a bias; compare outputs with kv_dtype auto")
    layers = config.layers + spec.drafter_layers
    block = block_layout(spec, layers=layers, kv_heads=config.rank_kv_heads(size), head_dim=config.head_dim)
    kernels = choose_kernels(spec, block, size)
    group = TpGroup(rendezvous_file, rank, size, device) if size > 1 else None
    tp = TensorParallel(rank, size, group.collectives if group else None)
    matrix = choose_matrices(spec, kernels)
    if memory is not None:
        memory.limit(spec.device_share)
    with insufficient_memory("engine.device_share", "the weights do not fit: raise engine.device_share or tp"):
        model = load_model(model_dir, config, tp, device, dtype, max_tokens=max_model_tokens, matrix=matrix)
    if matrix.is_native:
        torch.set_num_threads(1)  # torch's threads would spin on cores of the kernels' threads
    paged = paged or choose_paged_path(model, block, dtype, device)
    drafts = choose_drafts(spec, Target(model_dir, model, tp, matrix, kernels, paged, max_model_tokens))
    draw_rows = _draw_rows_of_all(group, device, config.vocab_size)
    runner_of = partial(
        ModelRunner, model, exporter=exporter, device=device, kernels=kernels, paged=paged, draw_rows=draw_rows
    )
    drafter_of = None if drafts is None else drafts.make
    run_largest = partial(_run_largest, runner_of, drafter_of, block, spec, max_model_tokens)
    records = paged is not None and paged.recorder is not None
    available, automatic = _pool_room(spec, block, memory, run_largest, group, records=records)
    layout = pool_layout(spec, block, available, automatic, drafts.block_bytes if drafts is not None else 0)
    slots = host_slots(spec, layout)
    with insufficient_memory(
        "engine.kv_memory_bytes",
        f"a KV pool of {layout.pool_bytes} bytes and recorded decode steps do not fit beside the weights: lower it, or "
        "engine.max_running_requests",
    ):
        pool = KvPool(layout, device, spare=paged is not None)
        host = HostPool(slots, pool) if slots else None
        drafter = None if drafter_of is None else drafter_of(pool)
        may_record = drafts is None or not drafts.needs_hidden
        graphs = _record(model, pool, paged, spec, max_model_tokens, group) if may_record else None
    runner = runner_of(pool=pool, host=host, barrier=group.barrier if group else None, graphs=graphs, drafter=drafter)
    leader = None
    if rank == 0:
        blocks = BlockPool(layout.num_blocks, HostTier(slots) if slots else None)
        leader = _leader(model_dir, spec, config, max_model_tokens, runner, blocks, drafts, group)
    return Rank(config, model, layout, pool, max_model_tokens, _work_shape(config, spec, layout), runner, group, leader)


def _pool_room(
    spec: EngineSpec,
    block: KvPoolLayout,
    memory: DeviceMemory | None,
    run_largest: Callable[[], None],
    group: TpGroup | None,
    *,
    records: bool,
) -> tuple[int, int]:
    """Bytes that a KV pool can have here, and those that it gets if the spec does not say."""
    if memory is None:
        return available_bytes(), spec.cpu_pool_bytes
    available = measured_budget(memory, spec, run_largest, records=records) - block.block_bytes  # the spare block
    return available, available if group is None else group.least(available)  # ranks use the same block numbers


def _leader(
    model_dir: Path,
    spec: EngineSpec,
    config: ModelConfig,
    max_model_tokens: int,
    runner: ModelRunner,
    blocks: BlockPool,
    drafts: Drafts | None,
    group: TpGroup | None,
) -> TandemEngine:
    scheduler = Scheduler(
        blocks,
        block_tokens=spec.block_tokens,
        max_running_requests=spec.max_running_requests,
        max_step_tokens=spec.max_step_tokens,
        max_model_tokens=max_model_tokens,
        window_tokens=config.traits.widest_window,
        speculator=None if drafts is None else drafts.speculator(spec),
        batches=BatchRule.of(spec),
        prompt_limit=PromptLimit(spec.longest_step_s, spec.max_step_tokens) if spec.longest_step_s else None,
    )
    return TandemEngine(
        runner,
        scheduler,
        config.vocab_size,
        group.send_step if group else None,
        group.check_failed_alike if group else None,
        Grammars(partial(GrammarCompiler.load, model_dir, config.vocab_size, sorted(config.eos_token_ids))),
        lacks=frozenset() if embeds_by_last_token(model_dir) else frozenset({Capability.EMBEDDINGS}),
    )


def _work_shape(config: ModelConfig, spec: EngineSpec, layout: KvPoolLayout) -> WorkShape:
    weight_bytes = _QUANTISED_BYTES.get(spec.weights, DTYPE_BYTES[spec.dtype])
    return WorkShape.of(config, weight_bytes=weight_bytes, kv_bytes=layout.token_bytes / config.head_dim)


def _draw_rows_of_all(group: TpGroup | None, device: torch.device, vocab: int) -> DrawRows | None:
    """Ranks must draw alike, so Triton draws only if it can on each."""
    chosen = choose_draw_rows(device, vocab)
    return chosen if group is None or group.least(int(chosen is not None)) else None


def _run_largest(
    runner_of: Callable[..., ModelRunner],
    drafter_of: Callable[[KvPool], Drafter] | None,
    block: KvPoolLayout,
    spec: EngineSpec,
    max_model_tokens: int,
) -> None:
    pool = KvPool(block, torch.device(spec.device))
    runner = runner_of(pool=pool, drafter=None if drafter_of is None else drafter_of(pool))
    for step in largest_steps(spec, max_model_tokens):
        if (launched := runner.launch(step)) is not None:
            launched.wait()


def _record(
    model: Decoder,
    pool: KvPool,
    paged: PagedPath | None,
    spec: EngineSpec,
    max_model_tokens: int,
    group: TpGroup | None,
) -> DecodeGraphs | None:
    """All ranks record, or none: steps have collectives."""
    able = None
    if paged is not None and paged.kernel is not None and paged.recorder is not None:
        able = paged.kernel, paged.recorder, paged.store
    if (group is not None and not group.least(int(able is not None))) or able is None:
        return None
    graphs = DecodeGraphs(
        model, pool.with_spare, *able,
        most_requests=spec.max_running_requests, most_tokens=max_model_tokens,
    )  # fmt: skip
    graphs.record_all()
    return graphs
