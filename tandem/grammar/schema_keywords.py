"""Keywords of JSON Schemas: those that llguidance takes and does not keep, and the one that an error is about."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite
from typing import Any

import llguidance

# Keywords whose value is one schema, a list of them, or an object of them.
_ONE = frozenset(
    [
        "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    ]
)  # fmt: skip
_MANY = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_NAMED = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
# What llguidance says, the keywords that it may say it of, and what to tell clients if not its own words.
_CAUSES = (
    ("Unimplemented keys", ("$ref",), "it refers to a schema with keywords that are not supported"),
    ("Resource ", ("$ref", "$schema"), "schemas of other documents are not fetched; put them in $defs"),
    (
        "oneOf constraints",
        ("oneOf",),
        "its schemas might overlap; use anyOf, or in each an object with a required property that has its own const",
    ),
    ("min/maxProperties", ("minProperties", "maxProperties"), ""),
    ("Unknown format", ("format",), ""),
    ("patternProperty", ("patternProperties",), ""),
    ("circular references", ("$ref",), ""),
    ("egex", ("pattern", "patternProperties"), ""),
)
_NAMES_ONE = re.compile(r"for '(\w+)'")


@dataclass(frozen=True, slots=True)
class Keyword:
    """`pointer`: the JSON pointer of `schema[name]` in the whole."""

    pointer: str
    name: str
    schema: dict[str, Any]

    @property
    def value(self) -> Any:
        return self.schema[self.name]


def keywords(schema: object, pointer: str = "") -> Iterator[Keyword]:
    """Those of a schema and of the schemas in it."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        inner = f"{pointer}/{_escaped(name)}"
        yield Keyword(inner, name, schema)
        if name in _ONE:
            yield from keywords(value, inner)
        if name in _MANY and isinstance(value, list):
            for number, each in enumerate(value):
                yield from keywords(each, f"{inner}/{number}")
        if name in _NAMED and isinstance(value, dict):
            for key, each in value.items():
                yield from keywords(each, f"{inner}/{_escaped(key)}")


def unkept(schema: object) -> tuple[Keyword, str] | None:
    """The first keyword that llguidance takes and does not keep, and what to do."""
    bounds = _Bounds(schema)
    for found in keywords(schema):
        match found.name:
            case "minProperties" if _may_repeat(found):
                return found, "more than one property that is not required; name them in required"
            case "exclusiveMinimum" | "exclusiveMaximum" if bounds.lets_through(found):
                return found, "a whole number as this bound with the other bound less than 1 away"
            case "pattern" if isinstance(found.value, str) and _has_set_syntax(found.value):
                return found, "[, &&, -- and ~~ in a class of characters; write \\ before each character"
            case "patternProperties" if isinstance(found.value, dict) and any(map(_has_set_syntax, found.value)):
                return found, "[, &&, -- and ~~ in a class of characters; write \\ before each character"
    return None


def cause(schema: object, reason: str) -> tuple[Keyword, str] | None:
    """The keyword that llguidance's `reason` is about, and what is wrong with it. Empty: it is not supported at all."""
    named = _unimplemented(reason)
    if direct := next((each for each in keywords(schema) if each.name in named), None):
        return direct, ""
    names, said = next(((names, said) for text, names, said in _CAUSES if text in reason), ((), ""))
    if found := _NAMES_ONE.search(reason):
        names = (found[1],)
    if guilty := _guilty(schema, [each for each in keywords(schema) if each.name in names], reason):
        return guilty, said or reason
    return None


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "no reason was given"


def grammar_of(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _guilty(schema: object, suspects: Sequence[Keyword], reason: str) -> Keyword | None:
    """The suspect without which, and without those before it, llguidance says something else."""
    if not suspects or _said(schema, suspects[:0]) != reason:
        return suspects[0] if suspects else None
    first, last = 0, len(suspects)  # without `first` of them it says the same
    while last - first > 1:
        middle = (first + last) // 2
        if _said(schema, suspects[:middle]) == reason:
            first = middle
        else:
            last = middle
    return suspects[first]


def _said(schema: object, without: Sequence[Keyword]) -> str:
    left_out = {(id(each.schema), each.name) for each in without}
    return first_line(llguidance.LLMatcher.validate_grammar(grammar_of(_copied(schema, left_out))))


def _copied(value: object, left_out: set[tuple[int, str]]) -> object:
    if isinstance(value, list):
        return [_copied(each, left_out) for each in value]
    if isinstance(value, dict):
        return {key: _copied(each, left_out) for key, each in value.items() if (id(value), key) not in left_out}
    return value


def _may_repeat(found: Keyword) -> bool:
    """An answer may have one property twice, and then has fewer than it seems."""
    required = found.schema.get("required")
    names = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    return isinstance(found.value, int | float) and found.value > len(names) + 1


class _Bounds:
    """`{"exclusiveMinimum": 0, "maximum": 0.5}` lets 0 through, unless the type is integer. Bounds of schemas that may
    apply to the same value count as those of one."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._same: dict[int, int] = {}  # by id of a schema, that of another one in its group
        self._whole_below: set[tuple[int, int]] = set()  # of a group's upper bounds, the whole number under each
        self._whole_above: set[tuple[int, int]] = set()
        found = list(keywords(root))
        for each in found:
            for other in self._applied(each):
                self._same[self._group(id(other))] = self._group(id(each.schema))
        for each in found:
            if _is_number(each.value) and each.value != int(each.value):
                if each.name in ("maximum", "exclusiveMaximum"):
                    self._whole_below.add((self._group(id(each.schema)), floor(each.value)))
                elif each.name in ("minimum", "exclusiveMinimum"):
                    self._whole_above.add((self._group(id(each.schema)), ceil(each.value)))

    def lets_through(self, found: Keyword) -> bool:
        is_lower = found.name == "exclusiveMinimum"
        bound = found.schema.get("minimum" if is_lower else "maximum") if found.value is True else found.value
        if not _is_number(bound) or found.schema.get("type") == "integer":
            return False
        return (self._group(id(found.schema)), bound) in (self._whole_below if is_lower else self._whole_above)

    def _applied(self, found: Keyword) -> list[object]:
        """What the keyword applies to the same value."""
        if found.name == "$ref" and isinstance(found.value, str) and found.value.startswith("#"):
            return [_resolved(self._root, found.value)]
        return found.value if found.name in ("allOf", "anyOf", "oneOf") and isinstance(found.value, list) else []

    def _group(self, schema: int) -> int:
        while (other := self._same.get(schema, schema)) != schema:
            self._same[schema] = self._same.get(other, other)
            schema = other
        return schema


def _resolved(root: object, reference: str) -> object:
    value = root
    for key in reference.split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _has_set_syntax(pattern: str) -> bool:
    """Whether a class of characters has what Rust reads as an operation on sets, and others as characters."""
    is_inside, position = False, 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif not is_inside and char == "[":
            is_inside = True
            position += pattern.startswith("^", position + 1)
            position += pattern.startswith("]", position + 1)
        elif is_inside and char == "]":
            is_inside = False
        elif is_inside and (char == "[" or pattern[position : position + 2] in ("&&", "--", "~~")):
            return True
        position += 1
    return False


def _unimplemented(reason: str) -> frozenset[str]:
    """The keywords that llguidance names."""
    _, found, names = reason.partition("Unimplemented keys: ")
    try:
        return frozenset(json.loads(names)) if found else frozenset()
    except ValueError:
        return frozenset()


def _escaped(key: str) -> str:
    return key[:80].replace("~", "~0").replace("/", "~1")
