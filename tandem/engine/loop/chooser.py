"""Chooses the tokens of a step and says which answers end with them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from tandem.engine.api import Proposals, RequestEnd, TokenOut
from tandem.engine.output import StepOutput
from tandem.errors import InternalError, RequestFailed, TandemError
from tandem.grammar.masks import Following
from tandem.request import FinishReason
from tandem.sampling.sampler import Choice, choose, scored_choice
from tandem.scheduler.plan import Chunk
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence


class TokenChooser:
    """`end` is called with each sequence that ends."""

    def __init__(self, scheduler: Scheduler, end: Callable[[Sequence], None]) -> None:
        self._scheduler = scheduler
        self._end = end

    def choose(
        self,
        chunk: Chunk,
        output: StepOutput,
        sample: int,
        following: Following | None,
        tokens: list[TokenOut],
        ended: list[RequestEnd],
    ) -> int:
        """Chooses and reports the token of `sample` in `output`, those after it as long as proposed ones are right, and
        those that its grammar forces. Returns how many proposed ones were right."""
        sequence, compared, accepted, choices = chunk.sequence, 0, 0, 0
        before, first = len(sequence.tokens), len(tokens)
        try:
            for proposed in (*chunk.proposed, None):
                choice = self._chosen(sequence, output, sample + accepted, following)
                tokens.append(self._appended(sequence, choice))
                choices += 1
                reason = self._reason(sequence, choice.token_id)
                compared += proposed is not None
                accepted += choice.token_id == proposed
                if following is not None and reason is None:
                    reason, following = self._follow(sequence, following, choice.token_id, tokens)
                if reason is not None or choice.token_id != proposed or (sequence.grammar and following is None):
                    break
        except Exception as error:
            typed = error if isinstance(error, TandemError) else RequestFailed.by(error)
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, error=typed))
            return accepted
        if (
            sequence.speculation is not None
            and self._scheduler.speculator is not None
            and len(sequence.tokens) == before + choices
        ):
            sequence.speculation.sample, sequence.speculation.step = (
                sample + choices - 1,
                self._scheduler.speculator.step,
            )
        beyond = [token or 0 for token in output.tokens[sample + choices : sample + chunk.sampled_tokens]]
        run = (sequence.tokens[-1], *beyond)
        if chunk.proposed:
            from_prediction = sequence.speculation is not None and sequence.speculation.from_prediction
            proposals = Proposals(len(chunk.proposed), accepted, from_prediction)
            tokens[first] = structs.replace(tokens[first], proposals=proposals)
        if (chunk.draft or chunk.proposed) and (failure := self._accept(chunk, compared, accepted, run)) is not None:
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, error=failure))
            return accepted
        if reason is not None or sequence.is_exporting:
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, reason))
        return accepted

    def _accept(self, chunk: Chunk, compared: int, accepted: int, run: tuple[int, ...]) -> TandemError | None:
        """Returns the error of a request whose tokens cannot be recorded."""
        try:
            self._scheduler.accept(chunk, compared, accepted, run)
        except TandemError:
            raise
        except Exception as error:
            return RequestFailed.by(error)
        return None

    def _follow(
        self, sequence: Sequence, following: Following, token: int, tokens: list[TokenOut]
    ) -> tuple[FinishReason | None, Following | None]:
        """Takes what the grammar forces after `token`. Returns why the answer ends, and what may follow in this step if
        that is known."""
        assert sequence.grammar is not None
        after = sequence.grammar.after(following, token)
        for forced in after.forced:
            tokens.append(self._appended(sequence, Choice(forced)))
            if (reason := self._reason(sequence, forced)) is not None:
                return reason, None
        if after.is_complete:
            return FinishReason.STOP, None
        if after.forced or not sequence.grammar.has_begun:
            return None, None
        return None, following.after(token)

    def _chosen(self, sequence: Sequence, output: StepOutput, sample: int, following: Following | None) -> Choice:
        row, token = output.logits[sample], output.tokens[sample]
        if (failed := output.failed.get(sample)) is not None:
            raise failed
        if token is None:
            self._scheduler.forget(sequence)  # any block, also one found in the cache, may hold the fault
            raise InternalError("the model returned logits that are not finite")
        if row is None:
            if following is not None and following.forced and sequence.sampling.logprobs is None:
                return Choice(following.forced[0])
            found = output.logprobs.get(sample)
            return Choice(token) if found is None else Choice(token, found.logprob, found.top)
        if following is not None and following.forced:
            return scored_choice(row, following.forced[0], sequence.sampling)
        length = len(sequence.tokens)
        history = sequence.history(length) if sequence.sampling.changes_logits else None
        return choose(row, sequence.sampling, length, history, token, None if following is None else following.allowed)

    def _appended(self, sequence: Sequence, choice: Choice) -> TokenOut:
        first = sequence.generated == 0
        sequence.tokens.append(choice.token_id)
        return TokenOut(
            request_id=sequence.request_id,
            token_id=choice.token_id,
            logprob=choice.logprob,
            top=choice.top,
            cached_tokens=sequence.cached_tokens if first else None,
        )

    def _reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.ends_at(len(sequence.tokens), self._scheduler.max_model_tokens) else None
