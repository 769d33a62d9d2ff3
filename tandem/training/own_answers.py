"""A model's own answers, to fit drafters to: to prompts of a file, or to questions that the model asks itself.

A chat model that is given its template up to where a user's words begin writes such words (Xu et al., "Magpie", 2024,
arXiv:2406.08464).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tandem.engine.api import EngineRequest
from tandem.engine.factory import Rank
from tandem.errors import CheckpointError, TandemError
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

BATCH: Final = 32  # answered at a time, at most
LONGEST_QUESTION, LONGEST_ANSWER = 96, 256  # tokens
_SHORTEST: Final = 16
_MARK: Final = "\u2063words of the user\u2063"


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` of prompt and answer, which begins at `begin`."""

    tokens: tuple[int, ...]
    begin: int

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.begin


class OwnAnswers:
    """Asks one rank's engine. `prompts`: texts to answer in turns; none: the model asks itself.

    Raises CheckpointError if it has neither.
    """

    def __init__(
        self, rank: Rank, tokenizer: Tokenizer, template: ChatTemplate | None, prompts: Sequence[str], seed: int
    ) -> None:
        if template is None and not prompts:
            raise CheckpointError(
                "this model has no chat template, so it cannot ask itself: give it prompts (--prompts FILE)"
            )
        self._rank = rank
        self._tokenizer = tokenizer
        self._template = template
        self._prompts = prompts
        self._asked = 0
        self.given_tokens = 0  # questions and end tokens included
        self._seed = seed

    def take(self, tokens: int, report: Callable[[int], None]) -> list[Answer]:
        """Answers of at least so many tokens in all; half of them greedy. Calls `report` with the tokens so far."""
        found: list[Answer] = []
        unanswered = 0  # prompts since the last answer
        while (had := sum(answer.answered for answer in found)) < tokens:
            report(had)
            before, left = len(found), tokens - had
            count = max(1, min(BATCH, left // _SHORTEST))  # not many more than are wanted
            longest = max(_SHORTEST, min(LONGEST_ANSWER, 2 * left // count))
            prompts = [
                self._tokenizer.encode(text, add_special_tokens=self._template is None) for text in self._texts(count)
            ]
            found += [
                Answer((*prompt, *answer), len(prompt))
                for prompt, answer in zip(prompts, self._answers(prompts, longest, (0.0, 0.8)), strict=True)
                if len(answer) > 1
            ]
            unanswered = 0 if len(found) > before else unanswered + count
            if unanswered >= BATCH:
                raise CheckpointError(
                    f"the model gave no answer of two tokens to any of {unanswered} prompts: give it shorter ones"
                )
        return found

    def _texts(self, count: int) -> list[str]:
        if not self._prompts:
            questions = self._questions(count)
        else:
            questions = [self._prompts[(self._asked + place) % len(self._prompts)] for place in range(count)]
        self._asked += count
        if self._template is None:
            return questions
        return [self._template.render([{"role": "user", "content": question}]) for question in questions]

    def _questions(self, count: int) -> list[str]:
        assert self._template is not None
        before = self._template.render([{"role": "user", "content": _MARK}]).partition(_MARK)[0]
        prompts = [self._tokenizer.encode(before, add_special_tokens=False)] * count
        texts = [self._tokenizer.decode(tokens).strip() for tokens in self._answers(prompts, LONGEST_QUESTION, (1.0,))]
        return [text or "Tell me something." for text in texts]

    def _answers(
        self, prompts: Sequence[Sequence[int]], longest: int, temperatures: Sequence[float]
    ) -> list[tuple[int, ...]]:
        """In the order of the prompts, without end tokens; empty for a prompt that the engine refuses."""
        engine = self._rank.engine
        sampling = SamplingParams(max_tokens=longest, stop_token_ids=self._rank.config.eos_token_ids)
        answers: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            self._seed += 1
            own = replace(sampling, temperature=temperatures[place % len(temperatures)], seed=self._seed)
            answers[str(place)] = []
            try:
                engine.add(EngineRequest(str(place), tuple(prompt), own, HashKey("training")))
            except TandemError:
                continue
        while engine.has_work:
            for token in engine.step().tokens:
                self.given_tokens += 1
                if token.token_id not in self._rank.config.eos_token_ids:
                    answers[token.request_id].append(token.token_id)
        return [tuple(answers[str(place)]) for place in range(len(prompts))]
