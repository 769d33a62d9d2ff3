"""The JSON Schema test suite: a schema binds every answer to it, or is refused with the keyword."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tandem.errors import InputError, UnsupportedField
from tandem.grammar.compiler import Matcher
from tandem.grammar.constraint import any_schema, json_schema
from tandem.testing.schema_suite import Case, Grammars, cases, written

ANSWERS = 500 if os.environ.get("TANDEM_SOAK") else 10  # of each schema
CASES: Mapping[str, list[Case]] = {
    file: [each for each in cases() if each.file == file] for file in sorted({each.file for each in cases()})
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tmp_path_factory.mktemp("model"))


@pytest.mark.soak
@pytest.mark.parametrize("file", CASES)
def test_a_schema_binds_every_answer_or_is_refused_by_keyword(grammars: Grammars, file: str) -> None:
    for case in CASES[file]:
        grammar = outcome(grammars, case)
        if isinstance(grammar, UnsupportedField):
            assert keyword_at(case.schema, grammar.message.split(": ")[1]), (str(case), grammar.message)
            continue
        if isinstance(grammar, InputError):
            assert "Unsatisfiable" in grammar.message, (str(case), grammar.message)
            assert not any(is_valid for _, is_valid in case.tests), str(case)
            continue
        is_valid = Draft202012Validator(exact(json.dumps(case.schema))).is_valid
        random = Random(0)
        answers = [each for _ in range(ANSWERS) if (each := grammars.answer(grammar, random)) is not None]
        assert answers, str(case)
        assert [each for each in answers if not is_valid(exact(each))] == [], str(case)
        invalid = [written(instance) for instance, is_valid in case.tests if not is_valid]
        assert [each for each in invalid if grammars.accepts(grammar, each)] == [], str(case)


def exact(text: str) -> Any:
    """With decimals, because 0.07 as a float is no multiple of 0.01."""
    return json.loads(text, parse_float=Decimal)


def outcome(grammars: Grammars, case: Case) -> Matcher | InputError:
    try:
        return grammars.compile(case.schema)
    except InputError as refused:
        return refused


def keyword_at(schema: Any, pointer: str) -> bool:
    *path, last = (each.replace("~1", "/").replace("~0", "~") for each in pointer.split("/")[1:])
    for key in path:
        schema = schema[int(key) if isinstance(schema, list) else key]
    return last in schema


def unkept() -> Iterator[tuple[Any, str, str]]:
    """(a schema that the library takes, where it does not keep it, an answer that it would let through)"""
    yield {"type": "object", "minProperties": 2}, "/minProperties", '{"a": 1, "a": 2}'
    yield {"required": ["x"], "minProperties": 3, "type": "object"}, "/minProperties", '{"x": 1, "a": 1, "a": 2}'
    for low, high in (({"exclusiveMinimum": 0}, {"maximum": 0.5}), ({"minimum": -0.5}, {"exclusiveMaximum": 0})):
        place = "/exclusiveM" + ("inimum" if "maximum" in high else "aximum")
        zero = "0" if "maximum" in high else "-0"
        yield {"type": "number", **low, **high}, place, zero
        number = 0 if "maximum" in high else 1
        yield {"type": "number", "allOf": [low, high]}, f"/allOf/{number}{place}", zero
    shared = {"$defs": {"a": {"type": "number", "exclusiveMinimum": 10}}, "$ref": "#/$defs/a", "maximum": 10.5}
    yield shared, "/$defs/a/exclusiveMinimum", "10"
    yield {"type": "string", "pattern": "^[a-z&&[aeiou]]$"}, "/pattern", '"o"'
    spaced = {"patternProperties": {"^[a-c&&[b]]$": {"const": 1}}, "type": "object", "additionalProperties": False}
    yield spaced, "/patternProperties", '{"b": 1}'


@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")  # Python's, of what Rust reads otherwise
@pytest.mark.parametrize(("schema", "pointer", "invalid"), list(unkept()), ids=lambda each: str(each)[:40])
def test_what_the_library_would_not_keep_is_refused(
    grammars: Grammars, schema: Any, pointer: str, invalid: str
) -> None:
    with pytest.raises(UnsupportedField, match=re.escape(f"f: {pointer}: ")):
        json_schema(schema, "f")
    grammar = grammars.compile_unchecked(schema)  # when this fails, the library keeps it
    assert grammars.accepts(grammar, invalid)
    assert not Draft202012Validator(schema).is_valid(json.loads(invalid))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {"type": "object", "required": ["a"], "minProperties": 2},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5, "minimum": -1},
        {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"pattern": r"^[\[a\-]\[[a-z_]+$"},
        {"properties": {"pattern": {"type": "string"}, "minProperties": {"type": "integer"}}},
        {"enum": [{"minProperties": 9}]},
    ],
    ids=str,
)
def test_what_is_kept_is_not_refused(schema: dict[str, Any]) -> None:
    assert json_schema(schema, "f") == any_schema(schema, "f")


A, B = ({"type": "object", "properties": {"k": {"const": each}}, "required": ["k"]} for each in "ab")
OPEN = {"oneOf": [{"minimum": 1}, {"minimum": 2}]}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"oneOf": [A, B]}, "b": OPEN, "c": {"oneOf": [A, B]}}}, "/properties/b/oneOf"),
        ({"properties": {"a": {"format": "date"}, "b/c": {"format": "regex"}}}, "/properties/b~1c/format"),
        ({"prefixItems": [{"pattern": "a"}, {"pattern": "(?=a)b"}]}, "/prefixItems/1/pattern"),
        ({"anyOf": [{"maxItems": 2}, {"maxItems": 2.5}]}, "/anyOf/1/maxItems"),
        ({"items": {"$ref": "https://example.com/a.json"}}, "/items/$ref"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "/$ref"),
        ({"$schema": "https://example.com/schema"}, "/$schema"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_an_error_names_the_keyword_that_it_is_about(grammars: Grammars, schema: Any, pointer: str) -> None:
    with pytest.raises(UnsupportedField) as refused:
        grammars.compile(schema)
    assert refused.value.message.startswith(f"schema: {pointer}: ")
