"""vLLM as an `Engine` (tandem/engine/api.py), in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from tandem.engine.api import (
    AdapterFiles,
    Capability,
    EngineLoad,
    EngineRequest,
    PromptScores,
    RequestEnd,
    Reservation,
    StepResult,
    TokenOut,
    check_adapter,
    needed,
)
from tandem.errors import ContextExceeded, InputError, KvExhausted, RequestFailed, TandemError, UnsupportedField
from tandem.grammar.masks import Grammars
from tandem.images import ExpandedPrompt, PromptImage, check_spans
from tandem.kvcache.block_pool import CacheEvent
from tandem.kvcache.layout import blocks_for
from tandem.request import FinishReason
from tandem.vllm_engine.adapters import VllmAdapters
from tandem.vllm_engine.connector import Shared
from tandem.vllm_engine.conversions import Hasher, logprobs_of, prompt_scores_of, sampling_of
from tandem.vllm_engine.executor import RankExecutor
from tandem.vllm_engine.exports import Export
from tandem.vllm_engine.grammars import AnswerGrammar, mask_backend
from tandem.vllm_engine.images import VllmImages
from tandem.vllm_engine.scheduler import TandemScheduler

COUNT_CACHED_S = 0.05  # how often cached blocks are told from free ones while it computes
GRAMMAR_POLL_S = 0.005  # while there is nothing to compute but answers whose grammars are compiled
MOST_COUNTING = 0.02  # of the time


@dataclass(slots=True, eq=False)
class _Held:
    given: EngineRequest
    has_begun: bool = False  # here: its first tokens are computed, or their KV was imported
    cached_tokens: int | None = None  # to be said with its first token
    grammar: AnswerGrammar | None = None


class VllmEngine:
    """An `Engine` that cannot move answers. `embeds`: whether it gives embeddings. `images`: None: it takes none."""

    proposer = ""
    is_collecting = False

    def __init__(
        self,
        core: EngineCore,
        shared: Shared,
        adapters: VllmAdapters,
        grammars: Grammars,
        *,
        vocab_size: int,
        max_model_tokens: int,
        embeds: bool,
        images: VllmImages | None,
    ) -> None:
        unsure = {Capability.EMBEDDINGS: embeds, Capability.IMAGES: images is not None}
        self.can = frozenset(Capability) - {Capability.MOVES, *(each for each, can in unsure.items() if not can)}
        self._images = images
        self._core = core
        self._adapters = adapters
        self._grammars = grammars
        core.structured_output_manager.backend = mask_backend(vocab_size)
        self._executor: RankExecutor = core.model_executor
        self._scheduler: TandemScheduler = core.scheduler
        self._shared = shared
        self.vocab_size = vocab_size
        self._max_model_tokens = max_model_tokens
        self._block_tokens: int = core.vllm_config.cache_config.block_size
        self._held: dict[str, _Held] = {}
        self._is_starved = False  # nothing fits until something ends
        self._counted_s = self._counting_s = 0.0
        self._counts_changed = True

    # --- requests

    def add(self, request: EngineRequest) -> None:
        made, held = self._made(request)
        self._held[request.request_id] = held
        if request.sampling.embeds:
            self._executor.embeddings[request.request_id] = b""
        if request.export_from_block is not None:
            self._shared.exports[request.request_id] = Export(
                request.request_id, len(request.prompt), request.export_from_block
            )
        self._core.add_request(made)

    def reserve(self, request: EngineRequest) -> Reservation:
        made, held = self._made(replace(request, sampling=replace(request.sampling, prompt_logprobs=None)))
        cached = self._scheduler.reserve(made)
        if cached is None:
            raise KvExhausted("too few KV blocks are free for this prompt: try another worker, or retry")
        self._held[request.request_id] = held
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return Reservation(request.request_id, tuple(blocks), cached // self._block_tokens, cached)

    def join(self, request_id: str, first_token: int) -> None:
        self._check_tokens((first_token,), "first_token")
        held = self._held[request_id]
        if self._ends_with(held.given, first_token):
            raise InputError("max_tokens: expected more than one token for a join", field="max_tokens")
        held.has_begun = True
        self._scheduler.join(request_id, first_token)
        self._is_starved = False

    def _ends_with(self, given: EngineRequest, token: int) -> bool:
        """Whether a first token is the last."""
        sampling = given.sampling
        is_full = len(given.prompt) + 1 >= self._max_model_tokens
        return sampling.max_tokens <= 1 or is_full or token in sampling.stop_token_ids

    def cancel(self, request_id: str) -> bool:
        if self._held.pop(request_id, None) is None:
            return False
        self._executor.embeddings.pop(request_id, None)
        self._scheduler.cancel(request_id)
        self._is_starved, self._counts_changed = False, True
        return True

    def hold(self, request_id: str) -> bool:
        return False

    def resume(self, request_id: str) -> None:
        raise InputError(f"{request_id}: expected a held request")

    def export_held(self, request_id: str, first_block: int) -> int:
        raise InputError(f"{request_id}: expected a held request")

    def release_export(self, request_id: str) -> None:
        self.cancel(request_id)

    def _made(self, request: EngineRequest) -> tuple[Request, _Held]:
        self._check(request)
        answer_from = len(request.prompt) - request.answered_tokens
        prompt = list(request.prompt)
        made = Request(
            request.request_id,
            prompt[:answer_from],
            sampling_of(request),
            None,
            lora_request=self._adapters.request(request.hash_key.adapter),
            block_hasher=Hasher(request.hash_key, self._block_tokens, request.images),
            mm_features=self._images.features(request.images, request.hash_key) if self._images else None,
        )
        made.prefill_stats = None  # of a prompt alone: KV of answered tokens may be found as well
        if request.answered_tokens:
            made.append_output_token_ids(prompt[answer_from:])
        held = _Held(request)
        if (grammar := request.sampling.grammar) is not None:
            run = self._grammars.start(
                grammar,
                request.hash_key.cache_salt,
                answer_from=answer_from,
                ends=request.sampling.stop_token_ids,
                takes_forced=False,
            )
            held.grammar = AnswerGrammar(run, made.all_token_ids, self._report_late)
            made.structured_output_request = held.grammar.asked(grammar)
        self._is_starved = False
        return made, held

    def _check(self, request: EngineRequest) -> None:
        check_adapter(request, self.adapters)
        if lacking := needed(request.sampling, request.images) - self.can:
            raise UnsupportedField(f"expected a request that needs none of {', '.join(sorted(lacking))}")
        if request.request_id in self._held:
            raise InputError("request_id: expected an unused id", field="request_id")
        if not request.prompt:
            raise InputError("prompt: expected at least one token, got none", field="prompt")
        self._check_tokens(request.prompt, "prompt")
        check_spans([(each.start, each.tokens) for each in request.images], len(request.prompt))
        if request.sampling.logit_bias:
            self._check_tokens([token for token, _ in request.sampling.logit_bias], "logit_bias")
        if request.sampling.stop_token_ids:
            self._check_tokens([*request.sampling.stop_token_ids], "stop_token_ids")
        if not 0 <= request.answered_tokens < len(request.prompt):
            raise InputError("answer_tokens: expected fewer tokens than the prompt has", field="answer_tokens")
        limit = min(self._max_model_tokens, self._scheduler.total_blocks * self._block_tokens)
        if len(request.prompt) >= limit:
            raise ContextExceeded(
                f"prompt: expected fewer than {limit} tokens (the context, or all KV blocks of a worker), got "
                f"{len(request.prompt)}",
                field="prompt",
            )

    def _check_tokens(self, tokens: list[int] | tuple[int, ...], field: str) -> None:
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise InputError(f"{field}: expected token ids from 0 to {self.vocab_size - 1}", field=field)

    # --- adapters

    @property
    def adapters(self) -> frozenset[str]:
        return self._adapters.fingerprints

    def load_adapter(self, adapter: AdapterFiles) -> None:
        self._adapters.load(adapter)

    def drop_adapter(self, fingerprint: str) -> bool:
        if any(held.given.hash_key.adapter == fingerprint for held in self._held.values()):
            return False
        self._adapters.drop(fingerprint)
        return True

    # --- images

    def expand(self, prompt: Sequence[int], images: Sequence[bytes], cache_salt: bytes) -> ExpandedPrompt:
        return self._image_reader().expand(prompt, images, cache_salt)

    def read_images(self, images: Sequence[PromptImage], cache_salt: bytes) -> object:
        return self._image_reader().read(images, cache_salt)

    def _image_reader(self) -> VllmImages:
        if self._images is None:
            raise UnsupportedField("images: expected none with this model", field="images")
        return self._images

    # --- steps

    @property
    def has_work(self) -> bool:
        return self._scheduler.ready > 0 and not self._is_starved

    def step(self) -> StepResult:
        preempted = self.preemptions
        outputs, computed = self._core.step()
        planned, began = self._scheduler.planned, []
        for request_id, cached in planned.new.items():
            held = self._held[request_id]
            if not held.has_begun:
                held.has_begun, held.cached_tokens = True, cached
                began.append(request_id)
        tokens: list[TokenOut] = []
        scores: list[PromptScores] = []
        ended: list[RequestEnd] = []
        for each in (output for of_client in outputs.values() for output in of_client.outputs):
            if (known := self._held.get(each.request_id)) is not None:
                if (found := prompt_scores_of(each, known.given)) is not None:
                    scores.append(found)
                self._take(each, known, tokens, ended)
        if not computed and not ended and self._scheduler.ready and self.preemptions == preempted:
            self._wait_or_starve(ended)
        self._counts_changed = True
        if time.monotonic() - self._counted_s > max(COUNT_CACHED_S, self._counting_s / MOST_COUNTING):
            self._count_cached()
        return StepResult(tuple(tokens), tuple(ended), tuple(scores), planned.work, tuple(began))

    def _count_cached(self) -> None:
        if self._counts_changed:
            began_s = time.monotonic()
            self._scheduler.count_cached()
            self._counts_changed, self._counted_s = False, time.monotonic()
            self._counting_s = self._counted_s - began_s

    def _take(self, output: EngineCoreOutput, held: _Held, tokens: list[TokenOut], ended: list[RequestEnd]) -> None:
        grammar, is_whole = held.grammar, False
        if grammar is not None and grammar.failed is not None:
            self._fail(held, grammar.failed, ended)
            return
        for place, token in enumerate(output.new_token_ids):
            is_whole = grammar is not None and grammar.is_whole_after(token)
            cached, held.cached_tokens = held.cached_tokens, None
            logprob, top = logprobs_of(output.new_logprobs, place, held.given.sampling.logprobs)
            embedding = self._executor.embeddings.pop(held.given.request_id, b"")
            tokens.append(TokenOut(held.given.request_id, token, logprob, top, cached, embedding=embedding))
        request_id = held.given.request_id
        if output.finish_reason is None:
            if is_whole:
                self.cancel(request_id)
                ended.append(RequestEnd(request_id, FinishReason.STOP))
            return
        if output.finish_reason not in (VllmReason.STOP, VllmReason.LENGTH):
            self._fail(held, RequestFailed(f"vLLM ended it: {output.finish_reason}"), ended)
            return
        stops = is_whole or output.finish_reason == VllmReason.STOP
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        if held.given.export_from_block is None:
            del self._held[request_id]
            self._is_starved = False
        elif not is_whole and not self._ends_with(held.given, output.new_token_ids[-1]):
            ended.append(RequestEnd(request_id))  # an export ends with its first token
            return
        ended.append(RequestEnd(request_id, reason))

    def _fail(self, held: _Held, error: TandemError, ended: list[RequestEnd]) -> None:
        """The blocks of an export may be read: its role releases them."""
        request_id = held.given.request_id
        self._executor.embeddings.pop(request_id, None)
        if held.given.export_from_block is None:
            del self._held[request_id]
            if request_id in self._scheduler.requests:  # else it has ended with this step
                self._scheduler.cancel(request_id)
        ended.append(RequestEnd(request_id, error=error))

    def _report_late(self) -> None:
        """A step waits for what a grammar allows: the ranks and the routers know that this one lives."""
        self._executor.beat()
        self._shared.report_layer()

    def _wait_or_starve(self, ended: list[RequestEnd]) -> None:
        if self._scheduler.awaits_grammar:
            time.sleep(GRAMMAR_POLL_S)
        else:
            self._starve(ended)

    def _starve(self, ended: list[RequestEnd]) -> None:
        """Nothing could be scheduled: requests that wait hold the blocks, or leases do, which will be released."""
        if self._scheduler.give_up_blocks():
            return
        counts = self._scheduler.counts()
        if counts.leased or counts.in_use:
            self._is_starved = True
            return
        request = self._scheduler.waiting.peek_request()
        self.cancel(request.request_id)
        needs = blocks_for(request.num_tokens + 1, self._block_tokens)
        error = KvExhausted(f"{request.num_tokens} tokens need {needs} of {counts.total} KV blocks: retry later")
        ended.append(RequestEnd(request.request_id, error=error))

    def limit_steps(self, tokens: int) -> None:
        """For measuring: below the limit that it started with."""
        self._scheduler.max_num_scheduled_tokens = tokens

    def collect(self) -> float | None:
        return None

    def report_layers(self, after_layer: Callable[[], None]) -> None:
        self._shared.after_layer = after_layer

    def idle_tick(self) -> None:
        self._executor.beat()
        self._count_cached()

    def close(self) -> None:
        self._grammars.close()
        self._core.shutdown()

    # --- state

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            scheduler.ready - len(scheduler.running),
            len(scheduler.running),
            scheduler.waiting_tokens(),
            scheduler.counts(),
            scheduler.reserved,
        )

    def take_cache_events(self) -> list[CacheEvent]:
        return self._scheduler.take_cache_events()
