"""One rank of a worker whose engine is vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from tandem.checkpoint.model_config import ModelConfig, embeds_by_last_token
from tandem.config.launch import WorkerLaunch
from tandem.engine.api import KvExporter
from tandem.engine.kv_pool import KvPool
from tandem.engine.step_work import WorkShape
from tandem.errors import ConfigError, TandemError
from tandem.grammar.compiler import GrammarCompiler
from tandem.grammar.masks import Grammars
from tandem.kvcache.layout import DTYPE_BYTES, KvPoolLayout
from tandem.vllm_engine.adapters import VllmAdapters, answer_without_adapter
from tandem.vllm_engine.connector import SHARED, Shared
from tandem.vllm_engine.engine import VllmEngine
from tandem.vllm_engine.executor import RankExecutor, executor_of
from tandem.vllm_engine.first_runner import continue_answers
from tandem.vllm_engine.images import images_of, report_encoder
from tandem.vllm_engine.settings import engine_config, start_error


@dataclass(frozen=True, slots=True)
class VllmRank:
    """One rank. Only rank 0 has a `leader`."""

    model_dir: Path
    layout: KvPoolLayout
    pool: KvPool
    work_shape: WorkShape
    kv_heads: int
    max_model_tokens: int
    core: EngineCore
    leader: VllmEngine | None

    @property
    def executor(self) -> RankExecutor:
        return cast(RankExecutor, self.core.model_executor)

    @property
    def engine(self) -> VllmEngine:
        if self.leader is None:
            raise ConfigError("only rank 0 of a worker has an engine", field="rank")
        return self.leader

    def follow(self) -> None:
        """Runs the steps of rank 0 until it stops. Raises WorkerLost without it."""
        self.executor.follow()

    def close(self) -> None:
        """The last call. Rank 0 tells the others to stop."""
        if self.leader is None:
            self.core.shutdown()
        else:
            self.leader.close()


def start_rank(launch: WorkerLaunch, index: int, exporter: KvExporter) -> VllmRank:
    """Raises ConfigError, CheckpointError, InsufficientMemory."""
    spec, model_dir = launch.engine, Path(launch.model_dir)
    sizes = ModelConfig.of_any(model_dir)
    shared = Shared(exporter)
    if not current_platform.is_cpu():
        raise ConfigError("engine.kind: expected vLLM for CPUs, got vLLM for a GPU: install tandem-serve[vllm]")
    name = f"vllm-{launch.worker_id}-{launch.epoch:x}"
    make_executor = executor_of(launch.rendezvous_file, index, name)
    takes_adapters = launch.model.takes_adapters(launch.role)
    if takes_adapters:
        answer_without_adapter()
    config = engine_config(model_dir, spec, launch.tp, {SHARED: shared}, make_executor, takes_adapters=takes_adapters)
    model = config.model_config
    if model.enforce_eager:  # else vLLM compiles some small functions all the same, when they are first used
        torch.compiler.set_stance("force_eager")
    try:
        core = EngineCore(config, make_executor, log_stats=False)
    except TandemError:
        raise
    except Exception as error:
        raise start_error(error) from error
    if not config.use_v2_model_runner:
        core.collective_rpc(continue_answers)
    if shared.pool is None:
        raise ConfigError("engine.kind: expected a model with a KV cache")
    layout = shared.pool.layout
    shape = WorkShape.of(sizes, weight_bytes=DTYPE_BYTES[spec.dtype], kv_bytes=layout.element_bytes)
    kv_heads = model.get_total_num_kv_heads()
    if model.is_multimodal_model:
        report_encoder(core.model_executor.driver_worker.model_runner.get_model(), shared.report_layer)
    leader = None
    if index == 0:
        leader = VllmEngine(
            core,
            shared,
            VllmAdapters(core, is_enabled=takes_adapters),
            Grammars(partial(GrammarCompiler.load, model_dir, model.get_vocab_size(), sorted(sizes.eos_token_ids))),
            vocab_size=model.get_vocab_size(),
            max_model_tokens=model.max_model_len,
            embeds=not config.use_v2_model_runner and embeds_by_last_token(model_dir),
            images=None if config.use_v2_model_runner else images_of(config, core.scheduler.most_image_tokens),
        )
    return VllmRank(model_dir, layout, shared.pool, shape, kv_heads, model.max_model_len, core, leader)
