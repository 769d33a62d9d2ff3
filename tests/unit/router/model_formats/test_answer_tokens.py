"""What is found in answers that come as tokens: of single bytes, and of markers that are special tokens."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from random import Random

import pytest

from router.model_formats.parser import kept_tokens
from router.texts.detokenizer import Detokenizer, KeptTokens
from tandem.testing.models import write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tests.unit.router.model_formats.answers import ANSWERS, Answer, chunked, parse

VOCAB = 400
CHUNKINGS = 100_000 // len(ANSWERS) + 1 if os.environ.get("TANDEM_SOAK") else 10  # of each answer


class Models:
    """A byte-level tokenizer for each answer's format, in which some markers are special tokens."""

    def __init__(self, folder: Path) -> None:
        self._file = write_tiny_llama(folder, vocab=VOCAB) / "tokenizer.json"
        self._plain = json.loads(self._file.read_text())
        self.of = cache(self._of)

    def _of(self, marks: frozenset[str]) -> Tokenizer:
        numbered = [
            {"id": VOCAB + number, "content": mark, "special": True} for number, mark in enumerate(sorted(marks))
        ]
        unlike = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [*self._plain["added_tokens"], *({**each, **unlike} for each in numbered)]
        self._file.write_text(json.dumps({**self._plain, "added_tokens": added}))
        return Tokenizer.load(self._file.parent)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"))


def marks(answer: Answer) -> frozenset[str]:
    tools, reasoning = answer.formats.tools, answer.formats.reasoning
    of_calls = (*tools.triggers, *tools.other_marks) if tools else ()
    found = {*of_calls, *((reasoning.begin, reasoning.end) if reasoning else ())}
    return frozenset(each for each in found if each[:1] in "<[" and len(each) > 1)


def streamed(decoder: KeptTokens, prompt: list[int], tokens: list[int], random: Random) -> list[str]:
    """The text of each token, some of them joined as a worker's messages join them."""
    detokenizer = Detokenizer(decoder, prompt)
    texts = [*map(detokenizer.push, tokens), detokenizer.flush()]
    most, pieces = random.choice((1, 3, 20)), list[str]()
    while texts:
        size = random.randint(1, most)
        pieces.append("".join(texts[:size]))
        texts = texts[size:]
    return pieces


@pytest.mark.soak
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_tokens_do_not_change_what_is_found(models: Models, answer: Answer) -> None:
    """In every other round bytes are missing: then the text is that of all tokens together, with U+FFFD."""
    whole = parse(answer.formats, [answer.text], is_reasoning_opened=answer.is_reasoning_opened)
    for seed in range(CHUNKINGS):
        random = Random(seed)
        tokenizer = models.of(marks(answer) if random.random() < 0.5 else frozenset())
        special = {text: number for number in tokenizer.special_ids if (text := tokenizer.token(number))}
        decoder = KeptTokens(tokenizer, kept_tokens(answer.formats, special))
        texts = [answer.text] if random.random() < 0.5 else chunked(answer.text, random)  # other merges
        tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
        prompt = tokenizer.encode("é: ", add_special_tokens=False)[: random.randint(0, 4)]
        expected = whole
        if seed % 2:
            for _ in range(random.randint(1, 3)):
                del tokens[random.randrange(len(tokens))]
            expected = parse(answer.formats, [decoder.decode(tokens)], is_reasoning_opened=answer.is_reasoning_opened)
        pieces = streamed(decoder, prompt, tokens, random)
        assert parse(answer.formats, pieces, is_reasoning_opened=answer.is_reasoning_opened) == expected, seed
