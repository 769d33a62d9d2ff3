"""Chooses the tokens of a step and says which answers end with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
from tandem.speculation.proposers import Branch, Verified


class _Path(NamedTuple):
    """Proposed tokens. `sample` of the step's output chooses what comes before them; those after it what comes after
    each. `branch`: None for the chain."""

    tokens: tuple[int, ...]
    sample: int
    branch: Branch | None = None


@dataclass(slots=True)
class _Walk:
    """How far an answer goes along the tokens that were proposed for it. `sample`: the chain's first."""

    chunk: Chunk
    sample: int
    path: _Path
    choices: int = 0
    compared: int = 0
    accepted: int = 0
    of_branch: int = 0
    rank: int = 0  # of the branch

    @property
    def right(self) -> int:
        return self.accepted + self.of_branch

    @property
    def next_sample(self) -> int:
        return self.path.sample + self.choices

    def take(self, token: int) -> bool:
        """Whether `token` was proposed, so that the output has what comes after it."""
        proposed = self.path.tokens[self.choices] if self.choices < len(self.path.tokens) else None
        self.choices += 1
        is_right = token == proposed
        if self.path.branch is None:
            self.compared += proposed is not None
            self.accepted += is_right
            if self.chunk.beside and proposed is not None and not is_right:
                self.rank = _rank(self.chunk, self.accepted, token)
                self.path = _branch(self.chunk, self.accepted, self.rank, self.sample) or self.path
                is_right = self.path.branch is not None
        if self.path.branch is not None:
            self.of_branch += is_right
        return is_right

    def verified(self, output: StepOutput) -> Verified:
        chunk = self.chunk
        beyond = [token or 0 for token in output.tokens[self.sample + self.choices : self.sample + chunk.chain_samples]]
        return Verified(
            start=chunk.start + chunk.count,
            proposed=chunk.proposed_tokens,
            compared=self.compared,
            accepted=self.accepted,
            draft=chunk.draft,
            run=(chunk.sequence.tokens[-1], *beyond),
            rank=self.rank,
            of_branch=self.of_branch,
        )


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
        sequence, walk = chunk.sequence, _Walk(chunk, sample, _Path(chunk.proposed, sample))
        before, first = len(sequence.tokens), len(tokens)
        try:
            while True:
                last = walk.next_sample
                choice = self._chosen(sequence, output, last, following)
                tokens.append(self._appended(sequence, choice))
                reason, is_right = self._reason(sequence, choice.token_id), walk.take(choice.token_id)
                if following is not None and reason is None:
                    reason, following = self._follow(sequence, following, choice.token_id, tokens)
                if reason is not None or not is_right or (sequence.grammar and following is None):
                    break
        except Exception as error:
            typed = error if isinstance(error, TandemError) else RequestFailed.by(error)
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, error=typed))
            return walk.right
        speculator = self._scheduler.speculator
        if (
            sequence.speculation is not None
            and speculator is not None
            and len(sequence.tokens) == before + walk.choices
        ):
            sequence.speculation.sample, sequence.speculation.step = last, speculator.step
        if sequence.sampling.embeds:
            tokens[first] = structs.replace(tokens[first], embedding=output.embeddings[sample])
        if chunk.proposed:
            from_prediction = sequence.speculation is not None and sequence.speculation.from_prediction
            proposals = Proposals(chunk.proposed_tokens, walk.right, from_prediction)
            tokens[first] = structs.replace(tokens[first], proposals=proposals)
        failure = self._accept(walk, output) if chunk.draft or chunk.proposed else None
        if failure is not None or reason is not None or sequence.is_exporting:
            self._end(sequence)
            ended.append(RequestEnd(sequence.request_id, None if failure is not None else reason, failure))
        return walk.right

    def _accept(self, walk: _Walk, output: StepOutput) -> TandemError | None:
        """Returns the error of a request whose tokens cannot be recorded."""
        verified = walk.verified(output)
        try:
            self._scheduler.accept(walk.chunk, verified, walk.path.branch)
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


def _rank(chunk: Chunk, place: int, token: int) -> int:
    """Of `token` among those drafted beside the chain's at `place`, from 1; 0: it is none of them."""
    beside = chunk.beside[place]
    return beside.index(token) + 1 if token in beside else 0


def _branch(chunk: Chunk, shared: int, rank: int, sample: int) -> _Path | None:
    """The one with the chain's first `shared` tokens and then the one of this rank. `sample`: the chain's first."""
    sample += chunk.chain_samples
    for each in chunk.branches:
        if (each.shared, each.rank) == (shared, rank):
            return _Path(each.tokens(chunk.proposed, chunk.beside), sample, each)
        sample += 1 + each.count
    return None
