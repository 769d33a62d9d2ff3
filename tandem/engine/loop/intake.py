"""Takes requests in: checks what the router could not, and makes sequences of them for the scheduler."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from tandem.clock import Clock
from tandem.engine.api import EngineRequest, TextEngine, check_adapter
from tandem.errors import InputError, UnsupportedField
from tandem.grammar.masks import GrammarRun, Grammars, no_grammars
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence
from tandem.speculation.lookup import TokenIndex
from tandem.speculation.proposers import Speculation


class Intake:
    """`grammars` None: requests with a grammar are refused."""

    def __init__(
        self, scheduler: Scheduler, vocab_size: int, grammars: Grammars | None, clock: Clock, *, samples_on_device: bool
    ) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._clock = clock
        self._samples_on_device = samples_on_device
        self._arrivals = count()

    def sequence(self, request: EngineRequest) -> Sequence:
        check_adapter(request, TextEngine.adapters)
        if request.images:
            raise UnsupportedField("images: expected none with this engine", field="images")
        if not request.prompt:
            raise InputError("prompt: expected at least one token, got none", field="prompt")
        self.check_tokens(request.prompt, "prompt")
        if request.sampling.logit_bias:
            self.check_tokens([token for token, _ in request.sampling.logit_bias], "logit_bias")
        if not 0 <= request.answered_tokens < len(request.prompt):
            raise InputError("answer_tokens: expected fewer tokens than the prompt has", field="answer_tokens")
        # A checkpoint may name ids that no token has; they never come, and min_tokens forbids the others.
        stops = frozenset(each for each in request.sampling.stop_token_ids if 0 <= each < self._vocab_size)
        return Sequence(
            request_id=request.request_id,
            tokens=list(request.prompt),
            prompt_tokens=len(request.prompt),
            sampling=replace(request.sampling, stop_token_ids=stops),
            hash_key=request.hash_key,
            block_tokens=self._scheduler.block_tokens,
            arrival=next(self._arrivals),
            arrived_s=self._clock.now_s(),
            use_prefix_cache=request.use_prefix_cache,
            export_from_block=request.export_from_block,
            answered_tokens=request.answered_tokens,
            grammar=self._grammar_run(request),
            speculation=self._speculation(request),
        )

    def check_tokens(self, tokens: list[int] | tuple[int, ...], field: str) -> None:
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise InputError(f"{field}: expected token ids from 0 to {self._vocab_size - 1}", field=field)

    def _speculation(self, request: EngineRequest) -> Speculation | None:
        if not self._may_speculate(request):
            return None
        answer_from = len(request.prompt) - request.answered_tokens
        return Speculation(index=TokenIndex(self._usable_prediction(request), answer_from))

    def _usable_prediction(self, request: EngineRequest) -> tuple[int, ...]:
        """None of one that does not fit: the router checked it for the workers that it knew then, and an answer does
        not fail for a hint."""
        tokens = request.prediction
        if len(tokens) > self._scheduler.max_model_tokens or min(tokens, default=0) < 0:
            return ()
        return tokens if max(tokens, default=0) < self._vocab_size else ()

    def _may_speculate(self, request: EngineRequest) -> bool:
        """A device draws several tokens only if neither penalties nor a grammar let them depend on those before."""
        sampling = request.sampling
        depends = sampling.changes_logits or sampling.grammar is not None
        return self._scheduler.speculator is not None and not (self._samples_on_device and depends)

    def _grammar_run(self, request: EngineRequest) -> GrammarRun | None:
        sampling = request.sampling
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise no_grammars()
        return self._grammars.start(
            sampling.grammar,
            request.hash_key.cache_salt,
            answer_from=len(request.prompt) - request.answered_tokens,
            ends=sampling.stop_token_ids,
            # An export ends with its first token. Logprobs of forced tokens need the logits of each.
            takes_forced=request.export_from_block is None and sampling.logprobs is None,
        )
