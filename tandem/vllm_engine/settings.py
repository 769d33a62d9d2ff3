"""vLLM's configuration: what a worker's engine settings say, and what Tandem decides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vllm import EngineArgs, __version__
from vllm.config import KVEventsConfig, KVTransferConfig

from tandem.config.engine import EngineSpec
from tandem.errors import ConfigError, InsufficientMemory

DECIDED = {  # by Tandem, or by the settings beside `vllm`
    "async_scheduling": "a handoff's blocks are sent as each step ends",
    "block_size": "set block_tokens",
    "data_parallel_size": "set more workers",
    "decode_context_parallel_size": "its KV cannot be exchanged",
    "disable_hybrid_kv_cache_manager": "KV of several kinds cannot be exchanged",
    "distributed_executor_backend": "Tandem starts the ranks",
    "dtype": "set dtype",
    "ec_transfer_config": "encoders cannot be disaggregated",
    "enable_lora": "adapters are not served yet",
    "gpu_memory_utilization": "set device_share",
    "kv_cache_dtype": "its scales cannot be exchanged",
    "kv_cache_memory_bytes": "set kv_memory_bytes",
    "kv_events_config": "Tandem has an index of its own",
    "kv_transfer_config": "Tandem moves the KV",
    "max_model_len": "set max_model_tokens",
    "max_num_batched_tokens": "set max_step_tokens",
    "max_num_seqs": "set max_running_requests",
    "model": "it is the worker's model",
    "num_gpu_blocks_override": "set kv_blocks",
    "pipeline_parallel_size": "a pipeline's KV cannot be exchanged",
    "prefill_context_parallel_size": "its KV cannot be exchanged",
    "prefix_caching_hash_algo": "block hashes are Tandem's",
    "runner": "only models that generate are served",
    "scheduler_cls": "Tandem's reserves blocks for handoffs",
    "speculative_config": "drafts have KV of their own, which cannot be exchanged",
    "tensor_parallel_size": "set tp",
    "tokenizer": "the router has the tokenizer",
    "worker_cls": "Tandem starts the ranks",
}


def engine_config(model_dir: Path, spec: EngineSpec, tp: int, connector: dict[str, Any], executor: type[Any]) -> Any:
    """vLLM's configuration. `connector`: the connector's extra settings. Raises ConfigError."""
    known = {each.name for each in dataclasses.fields(EngineArgs)}
    for name in spec.vllm:
        if name in DECIDED:
            raise ConfigError(f"engine.vllm.{name}: expected none, because {DECIDED[name]}", field="engine.vllm")
        if name not in known:
            raise ConfigError(
                f"engine.vllm.{name}: expected a setting that vLLM {__version__} knows, as in its EngineArgs",
                field="engine.vllm",
            )
    settings: dict[str, Any] = {"enforce_eager": True, "disable_log_stats": True, **spec.vllm}
    arguments = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=settings.pop("skip_tokenizer_init", True),
        dtype=spec.dtype,
        tensor_parallel_size=tp,
        block_size=spec.block_tokens,
        max_model_len=spec.max_model_tokens,
        max_num_seqs=spec.max_running_requests,
        max_num_batched_tokens=spec.max_step_tokens,
        num_gpu_blocks_override=spec.kv_blocks,
        kv_cache_memory_bytes=spec.cpu_pool_bytes,
        async_scheduling=False,
        distributed_executor_backend=executor,
        scheduler_cls="tandem.vllm_engine.scheduler.TandemScheduler",
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="TandemConnector",
            kv_connector_module_path="tandem.vllm_engine.connector",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        ),
        **settings,
    )
    try:
        return arguments.create_engine_config()
    except ValueError as error:
        raise ConfigError(f"engine.vllm: {_first_line(error)}", field="engine.vllm") from error


def start_error(error: ValueError) -> ConfigError:
    """vLLM's refusal to start, as ours: nearly always a pool too small for one request."""
    text = _first_line(error)
    if "KV cache" in text:
        return InsufficientMemory(
            f"engine.kv_memory_bytes: expected a pool that holds one request of the whole context: {text}; raise it, "
            "or lower max_model_tokens",
            field="engine.kv_memory_bytes",
        )
    return ConfigError(f"engine.vllm: {text}", field="engine.vllm")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Value error" in line), lines[0] if lines else type(error).__name__)
