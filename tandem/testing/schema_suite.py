"""The JSON Schema test suite of draft 2020-12, and what becomes of its schemas here.

It is that of the sources of jsonschema 4.26.0, without the folder `optional`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tandem.grammar.compiler import GrammarCompiler, Matcher
from tandem.grammar.constraint import Constraint, any_schema, json_schema
from tandem.testing.models import write_tiny_llama
from tandem.text.tokenizer import Tokenizer

SUITE = Path(__file__).resolve().parents[2] / "tests" / "data" / "json-schema-test-suite" / "draft2020-12.jsonl"
_VOCAB = 300
_EOS = 2
_ENDS = frozenset([_EOS])


@dataclass(frozen=True)
class Case:
    """`tests`: instances, and whether each is valid."""

    file: str
    what: str
    schema: Any
    tests: Sequence[tuple[Any, bool]]

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def cases() -> Iterator[Case]:
    for line in SUITE.read_text(encoding="utf-8").splitlines():
        yield Case(**json.loads(line))


class Grammars:
    """Grammars of schemas, and answers in them, for a vocabulary of bytes and some longer tokens."""

    def __init__(self, model_dir: Path) -> None:
        write_tiny_llama(model_dir, vocab=_VOCAB, seed=1, eos_token_id=_EOS)
        self._tokenizer = Tokenizer.load(model_dir)
        self._compiler = GrammarCompiler.load(model_dir, _VOCAB, [_EOS])
        self._closing = [self._tokens(text)[0] for text in '"}]']

    def compile(self, schema: object) -> Matcher:
        """Raises InputError as a client gets it."""
        return self.of(json_schema(schema, "schema"))

    def of(self, constraint: Constraint) -> Matcher:
        """As `compile`."""
        return self._compiler.check(constraint)

    def compile_unchecked(self, schema: object) -> Matcher:
        """As the library takes it."""
        return self._compiler.compile(any_schema(schema, "schema").grammar)

    def accepts(self, grammar: Matcher, text: str) -> bool:
        """Whether `text` is a whole answer."""
        matcher = grammar.copy()
        for token in self._tokens(text):
            if matcher.is_complete or not matcher.allowed(_ENDS)[token]:
                return False
            matcher.consume([token])
        return matcher.is_complete or bool(matcher.allowed(_ENDS)[_EOS])

    def answer(self, grammar: Matcher, random: Random, most: int = 120) -> str | None:
        """A random whole answer that closes what it opened soon. None: it has more than `most` tokens."""
        matcher, answer = grammar.copy(), list[int]()
        while not matcher.is_complete:
            allowed = matcher.allowed(_ENDS)
            if allowed[_EOS] and random.random() < 0.5:
                break
            if len(answer) == most:
                return None
            closes = random.random() < 0.4 + len(answer) / 20
            closing = [each for each in self._closing if closes and allowed[each]]
            others = [int(each) for each in np.flatnonzero(allowed) if each != _EOS]
            if not others:
                break
            answer.append(random.choice(closing or others))
            matcher.consume(answer[-1:])
        return self._tokenizer.decode(answer)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def written(instance: object) -> str:
    """As answers write it."""
    return json.dumps(instance, ensure_ascii=False)
