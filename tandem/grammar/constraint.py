"""What an answer has to satisfy, as clients ask for it, and the grammar of each kind.

Grammars are texts of llguidance: JSON that holds a JSON Schema or Lark. The router checks them; workers compile them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from tandem.errors import InputError, UnsupportedField
from tandem.grammar.json_strings import in_json_string, with_ascii_classes
from tandem.grammar.schema_keywords import Keyword, cause, grammar_of, unkept

MAX_GRAMMAR_BYTES = 64 << 10  # of what a client sends
MAX_DEPTH = 32  # of a schema
MAX_CHOICES = 1024
_OPTIONS = "x-guidance"  # the library's own keyword: it could turn checks off
# One space after `,` and `:`, and no other white space, which a model could write without end.
_COMPACT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class Constraint:
    """`field`: what the client sent it in. `schema`: the parsed JSON Schema, if it is one. `parts`: those that it was
    joined of. `is_free`: text is free in parts of the answer."""

    field: str
    grammar: str
    schema: object = None
    parts: tuple[Constraint, ...] = ()
    is_free: bool = False

    def located(self, reason: str) -> InputError:
        """The error for a grammar that cannot be used; for an unsupported keyword of a schema with its JSON pointer."""
        reason = reason.removeprefix("grammar: ")
        for part in self.parts or (self,):
            if found := cause(part.schema, reason):
                return _unsupported(part.field, *found)
        return InputError(f"{self.field}: expected a grammar that can be used: {reason}", field=self.field)


def json_schema(schema: object, field: str) -> Constraint:
    """`schema`: parsed JSON. Raises InputError, also for a keyword that would not be kept."""
    constraint = any_schema(schema, field)
    if found := unkept(schema):
        raise _unsupported(field, *found)
    return constraint


def any_schema(schema: object, field: str) -> Constraint:
    """As `json_schema`, of one that need not be kept: checks its kind, depth and size."""
    if not isinstance(schema, dict | bool):
        raise InputError(f"{field}: expected a JSON Schema (an object or a boolean), got {_kind(schema)}", field=field)
    if isinstance(schema, dict):
        if _OPTIONS in schema:
            raise UnsupportedField(f"{field}: /{_OPTIONS}: this keyword is not supported; leave it out", field=field)
        _check_depth(schema, field)
        schema = {**schema, _OPTIONS: _COMPACT}
    return _limited(Constraint(field, grammar_of(schema), schema))


def json_schema_text(text: str, field: str) -> Constraint:
    """As `json_schema`, of JSON text."""
    _check_size(len(text.encode()), field)  # before it is parsed
    try:
        schema = json.loads(text)
        json.dumps(schema, ensure_ascii=False).encode()  # an escape may be half a character
    except (ValueError, RecursionError) as error:
        reason = "it holds half a character" if isinstance(error, UnicodeEncodeError) else error
        raise InputError(f"{field}: expected a JSON Schema as text: {reason}", field=field) from None
    return json_schema(schema, field)


def json_object(field: str) -> Constraint:
    """Any JSON object."""
    return json_schema({"type": "object"}, field)


def regex(pattern: str, field: str) -> Constraint:
    """`\\d` and `\\w` are ASCII, as in JSON Schema."""
    _check_size(len(pattern.encode()), field)  # before it is converted
    written = llguidance.regex_to_lark(pattern, "dw")
    if pattern and not written:
        raise InputError(f"{field}: expected a regular expression, got {pattern[:20]!r}", field=field)
    return lark(f"start: /{written}/" if written else 'start: ""', field)


def choice(choices: Sequence[str], field: str) -> Constraint:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InputError(f"{field}: expected 1 to {MAX_CHOICES} texts, got {len(choices)}", field=field)
    if not all(choices):
        raise InputError(f"{field}: expected texts of at least one character, got an empty one", field=field)
    return lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in choices), field)


def grammar(text: str, field: str) -> Constraint:
    """A Lark grammar, or one of GBNF, which llama.cpp, vLLM and SGLang take. Raises InputError."""
    _check_size(len(text.encode()), field)  # before it is converted
    try:
        return lark(any_to_lark(text), field)
    except (GbnfToLarkError, ValueError, IndexError, RecursionError) as error:
        raise InputError(f"{field}: expected a grammar in Lark or GBNF: {error}", field=field) from None


def lark(text: str, field: str) -> Constraint:
    return _limited(Constraint(field, json.dumps({"grammars": [{"lark_grammar": text}]})))


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """What a text satisfies that may also stand in a JSON string.

    Args:
        plain: of the text.
        escaped: of what stands between the quotes.
        regex: Lark's, if it is a regular expression.
    """

    plain: Constraint
    escaped: Constraint
    regex: str | None

    @classmethod
    def parse(cls, syntax: str, definition: str, field: str) -> TextGrammar:
        """`syntax`: lark or regex. Raises InputError."""
        _check_size(len(definition.encode()), field)
        try:
            pattern = with_ascii_classes(definition) if syntax == "regex" else None
            text = definition if pattern is None else f"start: /{pattern}/"
            return cls(lark(text, field), lark(in_json_string(text), field), pattern)
        except ValueError as error:
            raise InputError(f"{field}: {error}", field=field) from None


def joined(start: str, parts: Sequence[Constraint], field: str, named: Mapping[str, Constraint]) -> Constraint:
    """`start`: Lark, in which `@name` is one of the grammars `named`. `parts`: what the client sent of all that."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": start}]
    for name, each in named.items():
        (inner,) = json.loads(each.grammar)["grammars"]
        grammars.append({"name": name, **inner})
    return _limited(Constraint(field, json.dumps({"grammars": grammars}), parts=tuple(parts)))


def free_text(text: str, parts: Sequence[Constraint], field: str) -> Constraint:
    """`text`: Lark, of which only some parts are bound."""
    return replace(joined(text, parts, field, {}), is_free=True)


def inline_json(schema: object) -> str:
    """A JSON Schema as an expression of Lark."""
    return "%json " + json.dumps({**schema, _OPTIONS: _COMPACT} if isinstance(schema, Mapping) else schema)


def _unsupported(field: str, keyword: Keyword, reason: str) -> UnsupportedField:
    where = f"{field}: {keyword.pointer}: "
    if not reason:
        return UnsupportedField(f"{where}the keyword {keyword.name[:40]!r} is not supported; leave it out", field=field)
    return UnsupportedField(f"{where}this use is not supported: {reason}", field=field)


def _limited(constraint: Constraint) -> Constraint:
    _check_size(len(constraint.grammar.encode()), constraint.field)
    return constraint


def _check_size(size: int, field: str) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise InputError(
            f"{field}: expected at most {MAX_GRAMMAR_BYTES} bytes, got {size}; make it smaller", field=field
        )


def _check_depth(schema: object, field: str) -> None:
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise InputError(f"{field}: expected a schema of at most {MAX_DEPTH} levels; make it flatter", field=field)


def _inner(value: object) -> list[object]:
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in found if isinstance(each, dict | list)]


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", int: "a number", float: "a number"}.get(type(value), "null")
