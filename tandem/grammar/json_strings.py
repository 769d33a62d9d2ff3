"""Rewrites a Lark grammar into one of the same texts as they stand in a JSON string.

JSON escapes character by character, and no escape begins another. So the grammar of the escaped texts is the grammar
with each literal and each regular expression replaced by that of its escaped texts. Each text has one way to be
written, that of `json.dumps(text, ensure_ascii=False)`.

Where a terminal ends, llguidance decides by the next byte. All escapes begin with the same one. If several terminals
have escapes, each character therefore becomes a terminal of its own, and the terminals become rules.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator

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
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_"}
_SPACE = frozenset("\t\n\v\f\r")
_CLASSES = {
    "d": frozenset[str](), "w": frozenset[str](), "s": _SPACE, "D": _ESCAPED, "W": _ESCAPED, "S": _ESCAPED - _SPACE,
}  # fmt: skip
# Terminals of Lark's library.
_COMMON = {
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "CR": r"\r",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


def in_json_string(lark: str) -> str:
    """Lark for what stands between the quotes. Raises ValueError with what cannot be rewritten."""
    tokens = list(_tokens(lark))
    if _count_escaped(tokens) < 2:
        return _rewritten(tokens, _Terminals())
    if any(text in ("%ignore", "&") for _, text in tokens):
        raise ValueError("beside %ignore or &, only one terminal may have characters that JSON escapes, such as quotes")
    return _rewritten(tokens, _Characters())


def with_ascii_classes(pattern: str) -> str:
    """A regular expression for between two `/` of Lark, whose `\\d` and `\\w` are ASCII. Raises ValueError."""
    pieces = []
    for kind, text in _atoms(pattern, ""):
        if kind == "set":
            text = re.sub(r"\\(.)|/", lambda found: _ASCII.get(found[1], found[0]) if found[1] else "\\/", text)
        elif kind == "escape" and text[1].lower() in _ASCII:
            text = f"[{'^' * text[1].isupper()}{_ASCII[text[1].lower()]}]"
        pieces.append("\\/" if text == "/" else text)
    return "".join(pieces)


def _tokens(lark: str) -> Iterator[tuple[str, str]]:
    """(kind, text). A range of characters is a regular expression, an import a definition."""
    position = 0
    while position < len(lark):
        found = _TOKEN.match(lark, position)
        if found is None:
            raise ValueError(f"{lark[position : position + 20]!r} cannot be used in the input of a tool")
        position = found.end()
        kind, text = found.lastgroup or "", found.group()
        if kind == "string" and (end := _RANGE.match(lark, position)):
            position = end.end()
            yield "regex", _range(text, end[1])
        elif kind == "import":
            name = found["imported"]
            if name not in _COMMON:
                raise ValueError(f"common.{name} cannot be used in the input of a tool; write its regular expression")
            yield "other", found["alias"] or name
            yield from [("other", ":"), ("regex", f"/{_COMMON[name]}/")]
        else:
            yield kind, text


def _count_escaped(tokens: list[tuple[str, str]]) -> int:
    """How many terminals have texts with escapes: those that are defined, and those without a name."""
    found: set[str] = set()
    unit = begun = ""  # the terminal whose definition this is; the first name of the line
    for number, (kind, text) in enumerate(tokens):
        if kind == "other" and text == "\n":
            begun = ""
        elif kind == "other" and text == ":":
            unit = begun if begun.strip("?!_")[:1].isupper() else ""
        elif kind == "other":
            begun = begun or text
        elif kind in ("string", "regex") and _has_escapes(kind, text):
            found.add(unit or f"{number}")
    return len(found)


def _has_escapes(kind: str, text: str) -> bool:
    if kind == "string":
        return not _ESCAPED.isdisjoint(_text(text.removesuffix("i")))
    plain, rewritten = text[1:].rpartition("/")[0], _Terminals().regex(text)
    return rewritten[1:].rpartition("/")[0] != plain


def _rewritten(tokens: list[tuple[str, str]], to: _Terminals | _Characters) -> str:
    pieces = []
    for kind, text in tokens:
        match kind:
            case "space":
                pieces.append(" ")
            case "string":
                pieces.append(to.string(text))
            case "regex":
                pieces.append(to.regex(text))
            case _:
                pieces.append(to.name(text))
    return "".join(pieces)


class _Terminals:
    """Keeps terminals, of escaped texts."""

    def name(self, text: str) -> str:
        return text

    def string(self, literal: str) -> str:
        text = _text(literal.removesuffix("i"))
        if not literal.endswith("i") or not text:
            return json.dumps(_inner(text))
        pattern = "".join(_escapes(each) if each in _ESCAPED else re.escape(each) for each in text)
        return "/{}/i".format(pattern.replace("/", "\\/"))

    def regex(self, literal: str) -> str:
        pattern, _, flags = literal[1:].rpartition("/")
        return f"/{''.join(_atom(kind, text, 's' in flags) for kind, text in _atoms(pattern, flags))}/{flags}"


class _Characters:
    """Makes each character a terminal, and terminals rules."""

    def name(self, text: str) -> str:
        return f"{text.lower()}__t" if text.strip("?!_")[:1].isupper() else text

    def string(self, literal: str) -> str:
        flag = "i" if literal.endswith("i") else ""
        text = _text(literal.removesuffix("i"))
        chars = [json.dumps(_inner(each)) + ("" if each in _ESCAPED else flag) for each in text]
        return "({})".format(" ".join(chars) or '""')

    def regex(self, literal: str) -> str:
        pattern, _, flags = literal[1:].rpartition("/")
        pieces = ["("]
        for kind, text in _atoms(pattern, flags):
            if kind == "group":
                pieces.append("(")
            elif kind == "char" and text in "|)":
                pieces += ['""'] * (pieces[-1] in "(|") + [text]
            elif kind == "repeat" or (kind == "char" and text in "*+?"):
                if pieces[-1][0] not in "*+?{":  # of what is repeated: lazy, or once more
                    pieces.append(text)
            else:
                pieces.append(f"/{_atom(kind, text, 's' in flags)}/{flags}")
        return " ".join([*pieces, *['""'] * (pieces[-1] in "(|"), ")"])


def _range(first: str, last: str) -> str:
    ends = [_text(first), _text(last)]
    if any(len(each) != 1 for each in ends):
        raise ValueError(f"{first}..{last}: expected single characters")
    return "/[{}-{}]/".format(*(f"\\x{{{ord(each):x}}}" for each in ends))


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise ValueError(f"{literal[:20]}: expected the escapes of JSON in a literal") from None


def _atoms(pattern: str, flags: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each part of a regular expression."""
    if set(flags) - {"i", "s"}:
        raise ValueError(f"/{flags}: flags other than i and s cannot be used in the input of a tool")
    position = 0
    while position < len(pattern):
        found = _ATOM.match(pattern, position)
        if found is None:
            raise ValueError(f"{pattern[position : position + 20]!r} cannot be used in the input of a tool")
        position = found.end()
        yield found.lastgroup or "", found.group()


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
    found = frozenset(_members(deque(_MEMBER.findall(body))))
    return _ESCAPED - found if is_negated else found


def _members(members: deque[str]) -> Iterable[str]:
    while members:
        first = members.popleft()
        if len(first) == 2 and first[0] == "\\" and first[1] in _CLASSES:
            yield from _CLASSES[first[1]]
        elif len(members) > 1 and members[0] == "-":
            members.popleft()
            low, high = _value(first), _value(members.popleft())
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
