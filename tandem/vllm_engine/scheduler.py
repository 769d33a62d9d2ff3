"""vLLM's scheduler, which also reserves blocks for prompts whose KV is imported, and keeps those that are exported.

What begins with an underscore in vLLM is private to it: tests/vllm/test_contract.py looks at what is used here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisher
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tandem.engine.step_work import NO_WORK, StepWork
from tandem.kvcache.block_pool import BlockCounts, CacheEvent
from tandem.vllm_engine.connector import SHARED, Shared

ADAPTER_WAIT_S = 1.0


class _KeptEvents(EventPublisher):  # type: ignore[misc]
    """Keeps vLLM's events of its prefix cache until they are asked for."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events += events.events

    def shutdown(self) -> None:
        self.events.clear()


@dataclass(slots=True)
class Planned:
    """Of the last step. `new`: requests that vLLM's runner had not seen before, each with how many of its tokens had KV
    already."""

    work: StepWork = NO_WORK
    new: dict[str, int] = field(default_factory=dict)


def _awaits_grammar(request: Request) -> bool:
    asked = request.structured_output_request
    return asked is not None and not asked.grammar.is_compiled


class TandemScheduler(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared: Shared = self.vllm_config.kv_transfer_config.kv_connector_extra_config[SHARED]
        self._kept = self.kv_event_publisher = _KeptEvents()
        self._reserved: dict[str, Request] = {}
        self._cached_blocks = 0
        self.preemptions = 0
        self.planned = Planned()
        self._short_since_s: dict[str, float] = {}  # of waiting requests, when there was first no room for an adapter
        self._making_way_s = math.inf  # of requests that came later, none for an adapter starts
        self._counted, self._adapters = -1, set[int]()  # of so many running requests
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    # --- imports and exports

    def reserve(self, request: Request) -> int | None:
        """Allocates the blocks of a prompt whose KV will be imported. Returns the number of its tokens that are cached;
        None: there are too few blocks, or places in the batch, now. A preempted answer comes first: it needs all of
        its blocks at once."""
        taken = len(self.running) + len(self.kv_holding_waiting)  # reserved ones are among these
        if taken >= self.max_num_running_reqs or any(each.num_preemptions for each in self.waiting):
            return None
        manager = self.kv_cache_manager
        found, cached, _ = manager.get_computed_blocks(request)
        blocks = manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=cached,
            new_computed_blocks=found,
            num_external_computed_tokens=request.num_tokens - cached,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            reserved_blocks=self._inflight_prefill_reserved_blocks(),
            has_scheduled_reqs=bool(self.running),
        )
        if blocks is None:
            return None
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = request.num_tokens
        self._inflight_prefills.add(request)
        self._reserved[request.request_id] = request
        self.add_request(request)
        return int(cached)

    def join(self, request_id: str, first_token: int) -> None:
        self._reserved.pop(request_id).append_output_token_ids(first_token)
        self.finished_recving_kv_req_ids.add(request_id)

    def cancel(self, request_id: str) -> None:
        """Frees a request's blocks, in any state: no transfer agent uses them any more."""
        self._shared.exports.pop(request_id, None)
        if self._reserved.pop(request_id, None) is not None:
            self.finished_recving_kv_req_ids.add(request_id)
        request = self.requests[request_id]
        if request.is_finished():
            self._free_blocks(request)  # an exported prompt
        else:
            self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """An exported prompt gets all of its blocks with its first chunk."""
        if request.request_id in self._shared.exports:
            computed = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
            kwargs["num_lookahead_tokens"] = max(request.num_tokens - computed - num_new_tokens, 0)
        return self._allocate(request, num_new_tokens, *args, **kwargs)

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        """Those of an exported prompt are read by transfer agents, so it is never preempted."""
        return request.request_id not in self._shared.exports and super()._request_blocks_can_be_freed(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may start."""
        if _awaits_grammar(request) or not super()._handle_blocked_waiting_request(request):
            return False
        return not self._waits_for_an_adapter(request)

    @property
    def awaits_grammar(self) -> bool:
        """Whether a request waits until its grammar is compiled: a step with it would hold up all others until then."""
        return any(map(_awaits_grammar, (*self.kv_holding_waiting, *self.waiting)))

    # --- adapters

    def _waits_for_an_adapter(self, request: Request) -> bool:
        """vLLM counts only the adapters that it has planned in this step; the next one may plan all that run."""
        if (adapter := request.lora_request) is None:
            return False
        return request.arrival_time > self._making_way_s or self._is_one_too_many(adapter.lora_int_id)

    def _is_one_too_many(self, adapter: int) -> bool:
        if len(self.running) != self._counted:  # within a step, running requests only become more
            self._counted = len(self.running)
            self._adapters = {each.lora_request.lora_int_id for each in self.running if each.lora_request is not None}
        return adapter not in self._adapters and len(self._adapters) >= self.lora_config.max_loras

    def _make_way(self) -> None:
        """While a request has long waited for room for its adapter, no later one for an adapter starts: else those that
        run would be asked for again and again, and none would make room."""
        if self.lora_config is None:
            return
        self._counted = -1
        now_s, before = time.monotonic(), self._short_since_s
        self._short_since_s = {}
        self._making_way_s = math.inf
        for request in (*self.kv_holding_waiting, *self.waiting):
            if request.lora_request is None or request.request_id in self._reserved:
                continue
            since_s = before.get(request.request_id)
            if since_s is None and not self._is_one_too_many(request.lora_request.lora_int_id):
                continue
            self._short_since_s[request.request_id] = since_s = now_s if since_s is None else since_s
            if now_s - since_s > ADAPTER_WAIT_S:
                self._making_way_s = min(self._making_way_s, request.arrival_time)

    # --- steps

    @property
    def ready(self) -> int:
        """Requests that a step could compute."""
        running, waiting = self.get_request_counts()
        return int(running + waiting - len(self._reserved))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if exports := self._shared.exports:
            # Answers come first. When blocks are short, they come last: the last is preempted, and if it cannot be,
            # nothing behind the request that lacks a block is computed.
            is_short = self.kv_cache_manager.block_pool.get_num_free_blocks() < len(self.running)
            self.running.sort(key=lambda request: (request.request_id in exports) != is_short)
        self._make_way()
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if new.mm_features:  # vLLM leaves out pixels whose KV there is, and never sends them after a preemption
                new.mm_features = self.requests[new.req_id].mm_features
            if len(all_tokens := self.requests[new.req_id].all_token_ids) > len(new.prompt_token_ids):
                new.prefill_token_ids = list(all_tokens)  # for either runner: the answer has begun elsewhere
        work = NO_WORK
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens - count
            if request.structured_output_request is not None and not request.is_prefill_chunk:
                request.structured_output_request.grammar.prepare()
            decodes = count == 1 and not request.is_prefill_chunk and start >= request.num_prompt_tokens
            work = work.with_chunk(start, count, decodes=decodes, samples=int(not request.is_prefill_chunk))
        self.planned = Planned(work, {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs})
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        super()._preempt_request(request, *args, **kwargs)

    # --- state

    @property
    def most_image_tokens(self) -> int:
        """Embeddings of an image that a step can compute."""
        return int(min(self.max_num_encoder_input_tokens, self.encoder_cache_manager.cache_size))

    @property
    def reserved(self) -> int:
        return len(self._reserved)

    def give_up_blocks(self) -> bool:
        """The youngest request whose KV was imported, and which waits, gives its blocks to the others; its KV will be
        computed again. Returns False if there is none."""
        holding = [each for each in self.kv_holding_waiting if each.request_id not in self._reserved]
        if not holding:
            return False
        youngest = holding[-1]
        self.kv_holding_waiting.remove_requests([youngest])
        self.deferred_waiting.discard(youngest)
        if youngest.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._update_waiting_for_remote_kv(youngest)
            youngest.status = RequestStatus.WAITING
        self._inflight_prefills.discard(youngest)
        self.kv_cache_manager.free(youngest)
        youngest.num_computed_tokens = 0
        youngest.num_preemptions += 1  # so that no import takes the blocks that it waits for
        self.waiting.prepend_request(youngest)
        self.preemptions += 1
        return True

    def waiting_tokens(self) -> int:
        """That are still to be computed before each request's next token."""
        begun = sum(max(0, each.num_tokens - each.num_computed_tokens - 1) for each in self.running)
        return int(begun + sum(each.num_tokens for each in self.waiting))

    @property
    def total_blocks(self) -> int:
        """Without vLLM's block 0, which is never used."""
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    def count_cached(self) -> None:
        """For `counts`: looks at each block, so it is not done at every step."""
        blocks = self.kv_cache_manager.block_pool.blocks
        self._cached_blocks = sum(each.ref_cnt == 0 and each.block_hash is not None for each in blocks)

    def counts(self) -> BlockCounts:
        """Conserved by vLLM's own count of free blocks, which includes cached ones."""
        manager = self.kv_cache_manager
        pool = manager.block_pool
        available, total = pool.get_num_free_blocks(), self.total_blocks
        held: Counter[int] = Counter()
        for request_id in [*self._reserved, *self._shared.exports]:
            request = self._reserved.get(request_id) or self.requests.get(request_id)
            if request is not None and (request_id in self._reserved or request.is_finished()):
                held.update(manager.get_block_ids(request_id)[0])
        leased = sum(pool.blocks[block].ref_cnt == holds for block, holds in held.items())
        cached = min(self._cached_blocks, available)
        return BlockCounts(available - cached, cached, leased, total - available - leased, total)

    def take_cache_events(self) -> list[CacheEvent]:
        """vLLM reports each block; a hash stays findable until the last block with it is gone."""
        pool = self.kv_cache_manager.block_pool
        taken, self._kept.events = [*self._kept.events, *self.kv_cache_manager.take_events()], []
        events = []
        for event in taken:
            if isinstance(event, BlockStored):
                events.append(CacheEvent(True, tuple(event.block_hashes)))
            elif isinstance(event, BlockRemoved):
                gone = tuple(
                    each
                    for each in event.block_hashes
                    if pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(each, 0)) is None
                )
                if gone:
                    events.append(CacheEvent(False, gone))
        return events
