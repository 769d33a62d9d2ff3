"""Builds grammars, in llguidance's Lark, of answers in which calls are valid.

A marker is a special token in some vocabularies and plain text in others: `special` maps the texts of special tokens
to their numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tandem.errors import InputError

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # the JSON Schema of each tool's arguments

# One space after `,` and `:`, and no other white space, which a model could write without end.
_COMPACT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANY = "(.|\\n)*"
# What the schema of an object may have where each property has a text of its own.
_DEFINED = ("#/$defs/", "#/definitions/")
_OF_OBJECTS = frozenset(
    [
        "type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description",
        "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
    ]
)  # fmt: skip
INPUT = "input"  # the only argument of a custom tool


class Mode(StrEnum):
    AUTO = "auto"  # free text, and then calls
    REQUIRED = "required"  # calls. A named tool: this, with that tool alone


@dataclass(frozen=True)
class Section:
    """Expressions for the calls of an answer.

    Args:
        heads: trigger -> what follows it until the end of the first call. Empty trigger: calls stand without a marker,
            at the beginning of the answer only.
        more: a further call.
        close: what ends the calls.
        bare: characters that text may not begin with, if a trigger is empty; else empty.
    """

    heads: Mapping[str, str]
    more: str
    close: str = ""
    bare: str = ""


class GrammarText(dict[str, Any]):
    """The schema of a string that satisfies a grammar of the client's.

    Args:
        name: of the grammar of its JSON-escaped texts, which stands beside the rules.
        regex: Lark's, for formats that write bare text; None: the client's grammar is none.
        field: the client's.
    """

    def __init__(self, name: str, regex: str | None, field: str) -> None:
        super().__init__(type="string")
        self.name = name
        self.field = field
        self._regex = regex

    @property
    def bare(self) -> str:
        """The regular expression of its bare texts. Raises InputError."""
        if self._regex is None:
            raise InputError(
                f"{self.field}: the model writes this input as bare text, of which a Lark grammar cannot tell the end; "
                "use syntax 'regex', or format 'text'",
                field=self.field,
            )
        return self._regex


class FreeValue(dict[str, Any]):
    """The schema of any value."""


class FreeArguments(dict[str, Any]):
    """The schema of arguments that need not satisfy the tool's: any object. Formats that have a text for each property
    write those of the tool, none of them required."""

    def __init__(self, tool: Schema) -> None:
        super().__init__(type="object")
        properties = tool.get("properties")
        self.names = [*properties] if isinstance(properties, Mapping) else []


class Lark:
    """Rules of one grammar."""

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = dict(special or {})
        self.used: set[int] = set()  # special tokens that the rules name
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        self._lines = ["%llguidance {}", f"TEXT: /{_ANY}/", "SPACE: /\\n{0,2}/"]

    def rule(self, body: str, options: str = "") -> str:
        """Its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def recursive(self, body: Callable[[str], str]) -> str:
        """The name of a rule, of whose name `body` makes its expression."""
        name = f"r{len(self._lines)}"
        self._lines.append("")
        self._lines[int(name[1:])] = f"{name}: {body(name)}"
        return name

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        parts: list[str] = []
        start = 0
        for found in self._pattern.finditer(text):
            token = self._special[found.group()]
            self.used.add(token)
            parts += [_quoted(text[start : found.start()]), f"<[{token}]>"]
            start = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[start:])])) or '""'

    def json(self, schema: Schema | bool) -> str:
        if isinstance(schema, GrammarText):
            return self.rule(f'"\\"" @{schema.name} "\\""')
        if isinstance(schema, Mapping) and (text := _grammar_text(schema)):
            return self.rule(f"{_quoted(f'{{{json.dumps(INPUT)}: ')} {self.json(text)} {_quoted('}')}")
        return self.rule(
            "%json " + json.dumps({**schema, "x-guidance": _COMPACT} if isinstance(schema, Mapping) else {})
        )

    def until(self, marker: str, regex: str = _ANY, before: str = "") -> str:
        """Text (`regex`) without the marker, the text `before`, and the marker."""
        terminal = f"/{regex}/ {_quoted(before)}"
        if regex != _ANY or before:
            terminal = self._terminal(f"({terminal}) & ~(/{_ANY}/ {_quoted(marker)} /{_ANY}/)")
        if marker in self._special:  # it cannot stand in text
            return f"{terminal if regex != _ANY or before else 'TEXT'} {self.text(marker)}"
        return self.rule(f"{terminal} {_quoted(marker)}", "[lazy]")

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def one_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def whole(self, section: Section, mode: Mode, parallel: bool, before: str, answer: str) -> str:
        """`before`, `answer`: as `ToolFormat.grammar`'s."""
        rest = f"({section.more})* {section.close}" if parallel else section.close
        answers = [answer] if answer else []
        is_free = mode is Mode.AUTO and not answer
        bare = re.escape(section.bare)
        text = f"[ \\t\\r\\n]*([^ \\t\\r\\n{bare}]{_ANY})?" if bare else _ANY  # it is no call without a marker
        for trigger, first in section.heads.items():
            if is_free and trigger:
                answers.append(f"{self.until(trigger, text)} {first} {rest}")
            elif is_free or section.bare or trigger == next(iter(section.heads)):
                answers.append(f"{self.text(trigger) if trigger else 'SPACE'} {first} {rest}")
        if is_free:
            answers.append(self._plain(section, text) if bare else "TEXT")
        space = "SPACE" if mode is Mode.REQUIRED else ""
        return self.start(" ".join(filter(None, (before, space, self.one_of(answers)))))

    def start(self, body: str) -> str:
        """The whole grammar."""
        return "\n".join([*self._lines, f"start: {body}"]) + "\n"

    def _plain(self, section: Section, text: str) -> str:
        """Text (a regular expression) without a trigger."""
        triggers = [each for each in section.heads if each and not self._pattern.search(each)]
        without = "".join(f" & ~(/{_ANY}/ {_quoted(each)} /{_ANY}/)" for each in triggers)
        return self._terminal(f"/{text}/{without}")


def parameters(schema: Schema, readable: re.Pattern[str], where: str) -> list[tuple[str, Schema, bool]]:
    """(name, schema, whether it is required) of each property, for formats that have a text for each.

    Raises InputError for what such a format cannot write, or could not be held to: a name that is not `readable`,
    another keyword of the object.
    """
    if isinstance(schema, FreeArguments):
        return [(name, FreeValue(), False) for name in schema.names if readable.fullmatch(name)]
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        raise InputError(f"tools: {where}: properties: expected an object of schemas", field="tools")
    if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
        raise InputError(f"tools: {where}: required: expected a list of names", field="tools")
    if unknown := [each for each in required if each not in properties]:
        raise InputError(
            f"tools: {where}: the schema requires {unknown[0][:80]!r}, which is not in its properties", field="tools"
        )
    if strange := next((each for each in schema if each not in _OF_OBJECTS), None):
        raise InputError(
            f"tools: {where}: this model's calls are not JSON, and the schema of such an object may only have "
            f"properties, required and $defs; leave {strange[:40]!r} out",
            field="tools",
        )
    if unreadable := next((each for each in properties if not readable.fullmatch(each)), None):
        raise InputError(
            f"tools: {where}: {unreadable[:80]!r} cannot be the name of a property in this model's calls; use letters, "
            "digits and _",
            field="tools",
        )
    if foreign := next((each for each in _references(schema) if not each.startswith(_DEFINED)), None):
        raise InputError(
            f"tools: {where}: $ref: expected one to #/$defs, because this model's calls are not JSON and each property "
            f"has a text of its own, got {foreign[:80]!r}",
            field="tools",
        )
    if never := next((each for each in required if properties[each] is False), None):
        raise InputError(f"tools: {where}: {never[:80]!r} is required, and its schema allows nothing", field="tools")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [
        (name, _with(each, definitions) if isinstance(each, Mapping) else {}, name in required)
        for name, each in properties.items()
        if each is not False
    ]


def _references(schema: object) -> Iterator[str]:
    """The targets of all `$ref` in a schema."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            if isinstance(target := each.get("$ref"), str):
                yield target
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)


def _with(schema: Schema, definitions: Schema) -> Schema:
    return schema if isinstance(schema, GrammarText) else {**definitions, **schema}


def _grammar_text(schema: Schema) -> GrammarText | None:
    """That of a custom tool."""
    properties = schema.get("properties")
    text = properties.get(INPUT) if isinstance(properties, Mapping) else None
    return text if isinstance(text, GrammarText) else None


def length(schema: Schema) -> str:
    """A regular expression for any text as long as the schema of a string wants it."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(.|\\n){{{least},{most}}}" if least or most != "" else _ANY


def optional(pieces: Sequence[tuple[str, bool]]) -> str:
    """A sequence of (expression, whether it must be there)."""
    return " ".join(piece if required else f"({piece})?" for piece, required in pieces)


def separated(lark: Lark, pieces: Sequence[tuple[str, bool]], separator: str) -> str:
    """As `optional`, with a text between those that are there."""
    after = '""'  # what may follow once a piece is there
    before = '""'  # what may stand from here, while none is there
    for piece, required in reversed(pieces):
        follow = f"{lark.text(separator)} {piece} {after}"
        begin = f"{piece} {after}"
        after, before = (
            lark.rule(follow if required else f"{follow} | {after}"),
            lark.rule(begin if required else f"{begin} | {before}"),
        )
    return before


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
