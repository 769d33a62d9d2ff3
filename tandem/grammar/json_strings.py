"""Rewrites a Lark grammar into one of the same texts as they stand in a JSON string.

JSON escapes character by character, and no escape begins another. So the grammar of the escaped texts is the grammar
with each literal and each regular expression replaced by that of its escaped texts. Each text has one way to be
written, that of `json.dumps(text, ensure_ascii=False)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_ESCAPED = frozenset([*map(chr, range(0x20)), '"', "\\"])  # the characters that JSON escapes
_UNESCAPED = '[^"\\\\\\x00-\\x1f]'
# As llguidance reads Lark.
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|(?:\#|//)[^\n]*)+)
    |(?P<import>%import[ \t]+common\.(?P<imported>[A-Z_]+)(?:[ \t]*->[ \t]*(?P<alias>[A-Z_0-9]+))?)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<other>%ignore\b|!?[?_]*[A-Za-z][A-Za-z0-9_-]*|~[ \t]*(?=[0-9])|->|\.\.|[0-9]+|\r?\n|[][(){}:|,.*+?&])
    """,
    re.VERBOSE,
)
_RANGE = re.compile(r'[ \t]*\.\.[ \t]*("(?:\\.|[^"\\\n])+")')
# One part of a regular expression, as Rust reads them.
_POINT = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xuU]\{[0-9a-fA-F]{1,8}\})"
_ATOM = re.compile(
    rf"(?P<set>\[\^?\]?(?:\\.|[^]\\])*\])|(?P<point>{_POINT})|(?P<property>\\p(?:\{{\w+\}}|\w))|(?P<escape>\\.)"
    r"|(?P<group>\((?:\?:)?)(?!\?)|(?P<repeat>\{[0-9,]+\})|(?P<char>[^[(\\{^$])",
    re.DOTALL,
)
_MEMBER = re.compile(rf"{_POINT}|\\.|.", re.DOTALL)
_SET_SYNTAX = re.compile(r"\[|&&|--|~~")
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_SPACE = frozenset("\t\n\v\f\r")
_CLASSES = {
    "d": frozenset[str](), "w": frozenset[str](), "s": _SPACE, "D": _ESCAPED, "W": _ESCAPED, "S": _ESCAPED - _SPACE,
}  # fmt: skip
# Terminals of Lark's library that need escapes.
_COMMON = {
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}


def in_json_string(lark: str) -> str:
    """Lark for what stands between the quotes. Raises ValueError with what cannot be rewritten."""
    pieces: list[str] = []
    position = 0
    while position < len(lark):
        found = _TOKEN.match(lark, position)
        if found is None:
            raise ValueError(f"{lark[position : position + 20]!r} cannot be used in the input of a tool")
        position = found.end()
        match found.lastgroup:
            case "space":
                pieces.append(" ")
            case "string" if end := _RANGE.match(lark, position):
                position = end.end()
                pieces.append(_range(found.group(), end[1]))
            case "string":
                pieces.append(_string(found.group()))
            case "regex":
                pattern, _, flags = found.group()[1:].rpartition("/")
                pieces.append(_regex(pattern, flags))
            case "other":
                pieces.append(found.group())
            case _:  # an import
                name, alias = found["imported"], found["alias"]
                is_rewritten = name in _COMMON
                pieces.append(f"{alias or name}: {_regex(_COMMON[name])}" if is_rewritten else found["import"])
    return "".join(pieces)


def _string(literal: str) -> str:
    text = _text(literal.removesuffix("i"))
    if not literal.endswith("i") or not text:
        return json.dumps(_inner(text))
    pattern = "".join(_escapes(each) if each in _ESCAPED else re.escape(each) for each in text)
    return "/{}/i".format(pattern.replace("/", "\\/"))


def _range(first: str, last: str) -> str:
    ends = [_text(first), _text(last)]
    if any(len(each) != 1 for each in ends):
        raise ValueError(f"{first}..{last}: expected single characters")
    return _regex("[{}-{}]".format(*(f"\\x{{{ord(each):x}}}" for each in ends)))


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise ValueError(f"{literal[:20]}: expected the escapes of JSON in a literal") from None


def _regex(pattern: str, flags: str = "") -> str:
    if set(flags) - {"i", "s"}:
        raise ValueError(f"/{flags}: flags other than i and s cannot be used in the input of a tool")
    pieces: list[str] = []
    position = 0
    while position < len(pattern):
        found = _ATOM.match(pattern, position)
        if found is None:
            raise ValueError(f"{pattern[position : position + 20]!r} cannot be used in the input of a tool")
        position = found.end()
        pieces.append(_atom(found.lastgroup or "", found.group(), "s" in flags))
    return f"/{''.join(pieces)}/{flags}"


def _atom(kind: str, text: str, dot_is_any: bool) -> str:
    match kind:
        case "set":
            return _or_escapes(text, _in_set(text))
        case "escape" if text[1] in _CLASSES:
            return _or_escapes(text, _CLASSES[text[1]])
        case "escape" | "point":
            return _escapes(_value(text)) if _value(text) in _ESCAPED else text
        case "property" if text[2:].lstrip("{")[0] not in "LN":
            raise ValueError(f"{text}: expected letters (L) or numbers (N) in the input of a tool")
        case "char" if text == ".":
            return _or_escapes(text, _ESCAPED if dot_is_any else _ESCAPED - {"\n"})
        case "char":
            return _escapes(text) if text in _ESCAPED else text
        case _:
            return text


def _or_escapes(text: str, escaped: frozenset[str]) -> str:
    """One character of `text`, as JSON writes it. `escaped`: those of it that JSON escapes."""
    if not escaped:
        return text
    unescaped = _UNESCAPED if text == "." else f"[{text}&&{_UNESCAPED}]"
    return f"(?:{unescaped}|{_escapes(escaped)})"


def _in_set(text: str) -> frozenset[str]:
    """The characters in a set that JSON escapes. Raises ValueError."""
    body = text[1:-1]
    is_negated = body.startswith("^")
    body = body.removeprefix("^")
    if _SET_SYNTAX.search(re.sub(r"\\.", "", body)):
        raise ValueError(f"{text[:20]}: [, &&, -- and ~~ in a set cannot be used; write \\ before each character")
    found = frozenset(_members(_MEMBER.findall(body)))
    return _ESCAPED - found if is_negated else found


def _members(members: list[str]) -> Iterable[str]:
    while members:
        first = members.pop(0)
        if len(first) == 2 and first[0] == "\\" and first[1] in _CLASSES:
            yield from _CLASSES[first[1]]
        elif len(members) > 1 and members[0] == "-":
            low, high = _value(first), _value(members[1])
            del members[:2]
            yield from (each for each in _ESCAPED if low <= each <= high)
        elif _value(first) in _ESCAPED:
            yield _value(first)


def _value(text: str) -> str:
    """The character that a part of a regular expression is. Raises ValueError."""
    if len(text) == 1:
        return text
    if len(text) > 2:
        point = int(text[2:].strip("{}"), 16)
        if point > 0x10FFFF:
            raise ValueError(f"{text}: expected a character of Unicode")
        return chr(point)
    if text[1] in _NAMED:
        return _NAMED[text[1]]
    if text[1].isalnum() or text[1] in "<>":
        raise ValueError(f"{text}: this escape cannot be used in the input of a tool")
    return text[1]


def _escapes(chars: Iterable[str]) -> str:
    """A regular expression for the escape of one of some characters."""
    return r"(?-i:\\(?:{}))".format("|".join(re.escape(_inner(each)[1:]) for each in sorted(chars)))


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
