"""What we touch of vLLM that is private, or may change with a version: a change fails here by name."""

from __future__ import annotations

import dataclasses
import inspect
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tandem.config.engine import EngineSpec
from tandem.errors import ConfigError
from tandem.vllm_engine import launch
from tests.vllm.conftest import ENGINE

if TYPE_CHECKING:
    from tandem.vllm_engine.rank import VllmRank

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_installed_version_is_in_the_range() -> None:
    assert launch.check_version().startswith("0.")


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.0.0+cpu"])
def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(launch, "version", lambda package: found)
    with pytest.raises(ConfigError, match=f"expected vLLM 0.32 or newer, below 0.33, got {found.split('+')[0]}"):
        launch.check_version()


def test_what_tandem_decides_is_still_a_setting(rank: VllmRank) -> None:
    from vllm import EngineArgs

    from tandem.vllm_engine.settings import DECIDED, OURS

    known = {each.name for each in dataclasses.fields(EngineArgs)}
    assert {*DECIDED, *OURS} <= known


def test_the_scheduler_has_what_ours_overrides_and_uses(rank: VllmRank) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler: Any = rank.engine._scheduler
    assert isinstance(scheduler, Scheduler)
    for name in (
        "_inflight_prefills",
        "_update_waiting_for_remote_kv",
        "deferred_waiting",
        "finish_requests",
        "get_request_counts",
        "kv_holding_waiting",
        "finished_recving_kv_req_ids",
        "kv_event_publisher",
        "requests",
        "running",
        "waiting",
    ):
        assert hasattr(scheduler, name), name
    assert parameters(type(scheduler.waiting).peek_request) == {"self"}
    assert parameters(Scheduler._preempt_request) >= {"self", "request", "timestamp"}
    assert parameters(Scheduler._request_blocks_can_be_freed) == {"self", "request"}
    assert parameters(Scheduler._free_blocks) == {"self", "request"}
    assert parameters(Scheduler._handle_blocked_waiting_request) == {"self", "request"}
    assert parameters(Scheduler._inflight_prefill_reserved_blocks) == {"self"}
    assert scheduler.defer_block_free is False, "steps overlap"
    assert scheduler.max_num_scheduled_tokens == ENGINE.max_step_tokens
    manager = scheduler.kv_cache_manager
    assert parameters(type(manager).allocate_slots) >= {
        "num_new_tokens",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "num_lookahead_tokens",
        "num_external_computed_tokens",
        "delay_cache_blocks",
        "full_sequence_must_fit",
        "reserved_blocks",
        "has_scheduled_reqs",
    }
    pool = manager.block_pool
    assert pool.null_block.block_id == 0
    assert pool.get_num_free_blocks() <= pool.num_gpu_blocks - 1
    assert {"ref_cnt", "block_hash"} <= set(dir(pool.blocks[1]))
    assert pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(b"none", 0)) is None
    connector = scheduler.connector
    assert connector._kv_cache_manager is manager
    assert connector._kv_transfer_config.kv_connector == "TandemConnector"


def test_a_request_has_what_is_used_of_it(rank: VllmRank) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("a", [1, 2], SamplingParams(skip_reading_prefix_cache=True), None)
    assert request.skip_reading_prefix_cache
    assert request.prefill_stats is not None
    assert (request.num_prompt_tokens, request.num_computed_tokens, request.num_preemptions) == (2, 0, 0)
    assert not request.is_prefill_chunk
    assert request.arrival_time == pytest.approx(time.time(), abs=60)
    request.append_output_token_ids([3])
    assert list(request.all_token_ids) == [1, 2, 3]


def test_the_first_model_runner_has_what_is_helped(rank: VllmRank) -> None:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "scheduler_output" in parameters(GPUModelRunner._update_states)
    assert "request" in parameters(InputBatch.add_request)
    assert {"output_token_ids", "generator", "num_computed_tokens"} <= {
        each.name for each in dataclasses.fields(CachedRequestState)
    }
    assert {"prefill_token_ids", "prompt_token_ids", "req_id"} <= {
        each.name for each in dataclasses.fields(NewRequestData)
    }
    runner = rank.executor.driver_worker.worker.model_runner
    assert runner._update_states.__name__ == "update_with_begun"
    assert runner.input_batch.add_request.__name__ == "add_begun"


def test_a_step_says_what_is_not_sent_to_other_ranks(rank: VllmRank) -> None:
    """A field that a version of vLLM adds is either sent or empty."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    from tandem.vllm_engine.steps import NOT_SENT

    sent = {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "kv_connector_metadata",
        "has_structured_output_requests",
        "scheduled_encoder_inputs",
        "free_encoder_mm_hashes",
    }
    of_rank_0 = {
        "scheduled_encoder_input_stats",
        "pending_structured_output_tokens",
        "aux_output_connector_metadata",
        "ec_manager_metadata",
        "kv_connector_block_state",
        "num_common_prefix_blocks",
    }
    assert {each.name for each in dataclasses.fields(SchedulerOutput)} == {*sent, *NOT_SENT, *of_rank_0}
    assert {each.name for each in dataclasses.fields(CachedRequestData)} == {
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    }
    assert {each.name for each in dataclasses.fields(NewRequestData)} == {
        "req_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "block_ids",
        "num_computed_tokens",
        "lora_request",
        "prompt_embeds",
        "prompt_is_token_ids",
        "prefill_token_ids",
        "replay_start",
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"block_size": 32}, "engine.vllm.block_size: expected none: set engine.block_tokens instead"),
        ({"spec_method": "ngram"}, "drafts have KV of their own"),
        ({"stream_interval": 4}, "the router has tokenizers, parsers and queues"),
        ({"scheduling_policy": "priority"}, "the router has tokenizers, parsers and queues"),
        ({"trust_remote_code": True}, "code of a checkpoint is never run"),
        ({"hf_overrides": {}}, "the checkpoint's fingerprint does not cover it"),
        ({"otlp_traces_endpoint": "http://a"}, "set observability.tracing.otlp_endpoint instead"),
        ({"compilation_config": {"bad": 1}}, "engine.vllm: "),
        ({"no_such_flag": 1}, "engine.vllm.no_such_flag: expected a setting that vLLM .* knows, as in its EngineArgs"),
        ({"enable-prefix-caching": True}, "did you mean enable_prefix_caching?"),
        ({"long_prefill_token_treshold": 1}, "did you mean long_prefill_token_threshold?"),
        ({"quantization": "no-such"}, "engine.vllm: "),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(rank: VllmRank, flags: dict[str, Any], said: str) -> None:
    from tandem.vllm_engine.settings import engine_config

    spec = EngineSpec(kind="vllm", block_tokens=32, vllm=flags)
    with pytest.raises(ConfigError, match=said) as refused:
        engine_config(rank.model_dir, spec, 1, {}, type(rank.executor), takes_adapters=False)
    assert refused.value.field == "engine.vllm"


def test_adapters_have_what_is_used(rank: VllmRank) -> None:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    assert list(inspect.signature(LoRARequest).parameters)[:3] == ["lora_name", "lora_int_id", "lora_path"]
    assert parameters(EngineCore.add_lora) == {"self", "lora_request"}
    assert parameters(EngineCore.remove_lora) == {"self", "lora_id"}
    assert {"max_loras", "max_cpu_loras", "max_lora_rank"} <= {each.name for each in dataclasses.fields(LoRAConfig)}
    assert LoRAConfig().max_lora_rank == EngineSpec().max_adapter_rank
    assert "self.lora_config.max_loras" in inspect.getsource(Scheduler.schedule)


def test_a_token_without_an_adapter_still_needs_help_on_cpus() -> None:
    """If this fails, vLLM helps itself: `answer_without_adapter` can go."""
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    output = torch.zeros(2, 1)
    lora_ops.bgmv_shrink(torch.ones(2, 3), torch.ones(2, 1, 3), output, torch.tensor([0, -1]))
    assert output.tolist() == [[3.0], [3.0]]
    assert punica_cpu.bgmv_shrink is lora_ops.bgmv_shrink
    assert "bgmv_shrink(" in inspect.getsource(lora_ops.sgmv_shrink)


def test_constraints_have_what_is_used(rank: VllmRank) -> None:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.request import StructuredOutputRequest

    assert [each.name for each in dataclasses.fields(GrammarOutput)] == [
        "structured_output_request_ids",
        "grammar_bitmask",
        "num_acceptable_drafts",
    ]
    assert [each.name for each in dataclasses.fields(StructuredOutputRequest)][:2] == ["params", "_grammar"]
    assert "structured_output_request is not None" in inspect.getsource(Request.use_structured_output.fget)
    assert "self.backend.allocate_token_bitmask" in inspect.getsource(StructuredOutputManager.grammar_bitmask)
    assert isinstance(rank.core.structured_output_manager, StructuredOutputManager)


def test_images_have_what_is_used(rank: VllmRank) -> None:
    from vllm.multimodal.cache import MultiModalProcessorOnlyCache
    from vllm.multimodal.inputs import MultiModalFieldElem, PlaceholderRange
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    scheduler: Any = rank.engine._scheduler
    assert scheduler.max_num_encoder_input_tokens >= 0
    assert scheduler.encoder_cache_manager.cache_size >= 0
    assert parameters(BaseMultiModalProcessor.__call__) >= {"prompt", "mm_items", "mm_uuid_items", "cache"}
    assert callable(BaseMultiModalProcessor._cached_apply_hf_processor)
    assert "self._apply_prompt_updates_via_text(" in inspect.getsource(BaseMultiModalProcessor._apply_prompt_updates)
    assert parameters(MultiModalProcessorOnlyCache.__init__) == {"self", "model_config"}
    assert PlaceholderRange(0, 4).get_num_embeds() == 4
    assert {each.name for each in dataclasses.fields(MultiModalFieldElem)} == {"data", "field"}
    assert {"image_mode", "kwargs"} <= parameters(ImageMediaIO.__init__)
    assert "size_threshold" in parameters(MsgpackEncoder.__init__)
    assert "share_mem" in parameters(MsgpackDecoder.__init__)
    assert "mm_features" in {each.name for each in dataclasses.fields(NewRequestData)}
    assert callable(rank.executor.driver_worker.model_runner.get_model)


def test_the_end_of_rank_0_is_that_of_its_engine(rank: VllmRank) -> None:
    """Which ends its grammars too; of other ranks, only that of vLLM."""
    ended: list[str] = []
    core: Any = SimpleNamespace(shutdown=lambda: ended.append("vLLM"))
    engine: Any = SimpleNamespace(close=lambda: ended.append("engine"))
    dataclasses.replace(rank, core=core, leader=engine).close()
    dataclasses.replace(rank, core=core, leader=None).close()
    assert ended == ["engine", "vLLM"]


def test_windows_have_what_is_used(rank: VllmRank) -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    kept = {each.name for each in dataclasses.fields(FullAttentionSpec)}
    assert {each.name for each in dataclasses.fields(SlidingWindowSpec)} - kept == {"extra_retained_tokens"}
    assert "sliding_window" in kept
    assert parameters(Executor.get_kv_cache_specs) == {"self"}
