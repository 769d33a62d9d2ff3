"""vLLM's configuration: what a worker's engine settings say, and what Tandem decides."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm import EngineArgs, __version__
from vllm.config import KVEventsConfig, KVTransferConfig

from tandem.config.engine import EngineSpec
from tandem.errors import ConfigError, InsufficientMemory
from tandem.images import MAX_IMAGES

IMAGE_CACHE_GB = 0.5  # of the pixels of the latest images, in rank 0
_REASONS = {
    "drafts have KV of their own, which cannot be exchanged": (
        "spec_method",
        "spec_model",
        "spec_tokens",
        "speculative_config",
    ),
    "Tandem moves the KV": (
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
    ),
    "its KV cannot be exchanged": (
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
    ),
    "Tandem starts the ranks, on one machine": (
        "distributed_executor_backend",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "worker_cls",
        "worker_extension_cls",
    ),
    "more workers do the same": (
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_start_rank",
        "enable_elastic_ep",
    ),
    "the router has tokenizers, parsers and queues": (
        "generation_config",
        "io_processor_plugin",
        "max_logprobs",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "override_generation_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "renderer_num_workers",
        "scheduling_policy",
        "stream_interval",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
    ),
    "of a request, Tandem takes text and images": (
        "convert",
        "default_mm_loras",
        "enable_mm_embeds",
        "enable_prompt_embeds",
        "limit_mm_per_prompt",
        "pooler_config",
        "runner",
        "skip_tokenizer_init",
    ),
    "images come with their request": (
        "allowed_local_media_path",
        "allowed_media_domains",
    ),
    "the model is a folder": (
        "download_dir",
        "hf_token",
        "revision",
    ),
    "code of a checkpoint is never run": (
        "code_revision",
        "trust_remote_code",
    ),
    "an adapter says which modules it has": ("lora_target_modules",),
    "the checkpoint's fingerprint does not cover it": (
        "hf_config_path",
        "hf_overrides",
        "model_class_overrides",
        "model_weights",
    ),
}
# With the settings that decide the same.
OURS = {
    "block_size": "engine.block_tokens",
    "dtype": "engine.dtype",
    "gpu_memory_utilization": "engine.device_share",
    "kv_cache_dtype": "engine.kv_dtype",
    "kv_cache_memory_bytes": "engine.kv_memory_bytes",
    "max_model_len": "engine.max_model_tokens",
    "max_num_batched_tokens": "engine.max_step_tokens",
    "max_num_seqs": "engine.max_running_requests",
    "num_gpu_blocks_override": "engine.kv_blocks",
    "otlp_traces_endpoint": "observability.tracing.otlp_endpoint",
    "served_model_name": "models[].name",
    "tensor_parallel_size": "prefill.tp and decode.tp",
}
# By Tandem; with the reason.
DECIDED = {name: why for why, names in _REASONS.items() for name in names} | {
    "async_scheduling": "a handoff's blocks are sent as each step ends",
    "disable_hybrid_kv_cache_manager": "KV of several kinds cannot be exchanged",
    "ec_transfer_config": "encoders cannot be disaggregated",
    "kv_events_config": "Tandem has an index of its own",
    "logprobs_mode": "logprobs are of the model's own distribution",
    "model": "it is the worker's model",
    "prefix_caching_hash_algo": "block hashes are Tandem's",
    "scheduler_cls": "Tandem's reserves blocks for handoffs",
    "mm_hasher_algorithm": "images have digests of Tandem's",
    "mm_processor_cache_type": "a rank's process has one",
    "seed": "each request has one",
    "structured_outputs_config": "grammars are Tandem's",
}


def _instead(name: str) -> str:
    """Why a setting is refused, or what to set instead."""
    return f": set {OURS[name]} instead" if name in OURS else f", because {DECIDED[name]}"


def engine_config(
    model_dir: Path,
    spec: EngineSpec,
    tp: int,
    connector: dict[str, Any],
    executor: type[Any],
    *,
    takes_adapters: bool,
) -> Any:
    """vLLM's configuration. `connector`: the connector's extra settings. Raises ConfigError."""
    known = {each.name for each in dataclasses.fields(EngineArgs)}
    for name in spec.vllm:
        if name in OURS or name in DECIDED:
            raise ConfigError(f"engine.vllm.{name}: expected none{_instead(name)}", field="engine.vllm")
        if name not in known:
            near = get_close_matches(name.replace("-", "_"), known, 1)
            hint = f": did you mean {near[0]}?" if near else ", as in its EngineArgs"
            raise ConfigError(
                f"engine.vllm.{name}: expected a setting that vLLM {__version__} knows{hint}", field="engine.vllm"
            )
    defaults = {"enforce_eager": True, "disable_log_stats": True, "mm_processor_cache_gb": IMAGE_CACHE_GB}
    settings: dict[str, Any] = defaults | spec.vllm
    if takes_adapters:
        room = {"max_loras": spec.max_adapters_in_batch, "max_cpu_loras": spec.max_adapters_kept}
        settings = {"enable_lora": True, **room, **settings}
    given = dict(
        model=str(model_dir),
        skip_tokenizer_init=True,
        dtype=spec.dtype,
        tensor_parallel_size=tp,
        block_size=spec.block_tokens,
        max_model_len=spec.max_model_tokens,
        max_num_seqs=spec.max_running_requests,
        max_num_batched_tokens=spec.max_step_tokens,
        num_gpu_blocks_override=spec.kv_blocks,
        kv_cache_dtype={"auto": "auto", "fp8": "fp8_e4m3"}[spec.kv_dtype],
        kv_cache_memory_bytes=spec.cpu_pool_bytes,
        limit_mm_per_prompt={"image": MAX_IMAGES, "video": 0, "audio": 0},
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
    )
    try:
        config = EngineArgs(**given, **settings).create_engine_config()
    except Exception as error:
        raise ConfigError(f"engine.vllm: {first_line(error)}", field="engine.vllm") from error
    if config.model_config.is_multimodal_model:  # its processors have a tokenizer
        config.model_config.skip_tokenizer_init = False
    return config


def start_error(error: Exception) -> ConfigError:
    """vLLM's refusal to start, as ours: nearly always a pool too small for one request."""
    text = first_line(error)
    if "KV cache" in text:
        return InsufficientMemory(
            f"engine.kv_memory_bytes: expected a pool that holds one request of the whole context: {text}; raise it, "
            "or lower max_model_tokens",
            field="engine.kv_memory_bytes",
        )
    return ConfigError(f"engine.kind: expected vLLM to start with this model and these settings, got: {text}")


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Value error" in line), lines[0] if lines else type(error).__name__)
