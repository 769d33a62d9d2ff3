"""Values as models write them in calls, given out as JSON while they come.

JSON's values come out as they are written, but control characters in strings are escaped and the backslash of an
unknown escape is doubled, because models write both. Python's literals and Gemma's marked strings become JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from router.model_formats.reader import Give, Markers, Reader, Steps

MAX_DEPTH = 64
_MAX_NUMBER = 512  # characters
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True)
class Dialect:
    """`mark`: text around strings without escapes; then keys of objects stand bare."""

    quotes: str = '"'
    words: Mapping[str, str] = field(default_factory=lambda: _JSON_WORDS)
    mark: str = ""


JSON = Dialect()
PYTHON = Dialect(quotes="\"'", words={**_JSON_WORDS, "True": "true", "False": "false", "None": "null"})

_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD_CHARS = re.compile(r"[A-Za-z]+")
KEY_CHARS = re.compile(r"[^\s:{}\[\],<>\"']+")
_HEX = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = {
    **{char: "\\" + char for char in '"\\/bfnrt'},
    **{"'": "'", "a": "\\u0007", "v": "\\u000b", "\n": ""},
}
_HEX_SIZES = {"x": 2, "u": 4, "U": 8}


def value(reader: Reader, give: Give, dialect: Dialect = JSON, depth: int = 0) -> Steps[bool]:
    """False: what comes is no value, or the text ended in it."""
    char = yield from reader.peek()
    if char in ("{", "["):
        return depth < MAX_DEPTH and (yield from _members(reader, give, dialect, depth))
    if dialect.mark:
        if char == dialect.mark[0]:
            return bool((yield from reader.take(dialect.mark))) and (
                yield from _marked_string(reader, give, dialect.mark)
            )
    elif char and char in dialect.quotes:
        return (yield from string(reader, give, dialect.quotes))
    if char and char in "-0123456789":
        return (yield from reader.attempt(_number(reader, give)))
    return (yield from reader.attempt(_word(reader, give, dialect.words)))


def string(reader: Reader, give: Give, quotes: str = '"') -> Steps[bool]:
    """A quoted string, as JSON's."""
    quote = yield from reader.peek()
    if not quote or quote not in quotes:
        return False
    reader.position += 1
    give('"')
    while not reader.is_too_long and (yield from reader.more()):
        if found := _PLAIN[quote].match(reader.buffer, reader.position):
            reader.position = found.end()
            give(found.group() if quote == '"' else found.group().replace('"', '\\"'))
            continue
        char = reader.buffer[reader.position]
        if char == "\\":
            if not (yield from reader.attempt(_escape(reader, give))):
                return False
            continue
        reader.position += 1
        if char == quote:
            give('"')
            return True
        give(json.dumps(char)[1:-1])
    return False


def text_of_string(reader: Reader, limit: int) -> Steps[str | None]:
    """What the JSON string that comes next says. None: there is none, or it has more than `limit` characters."""
    if not (yield from reader.take('"')):
        return None
    reader.position -= 1
    pieces: list[str] = []
    size = 0

    def give(text: str) -> None:
        nonlocal size
        size += len(text)
        if size <= 6 * limit + 2:
            pieces.append(text)

    if not (yield from string(reader, give)):
        return None
    try:
        text = json.loads("".join(pieces))
    except ValueError:  # cut, because it is too long
        return None
    return text if isinstance(text, str) and len(text) <= limit else None


def _number(reader: Reader, give: Give) -> Steps[bool]:
    number = yield from reader.run(_NUMBER_CHARS, _MAX_NUMBER)
    if not _NUMBER.fullmatch(number):
        return False
    give(number)
    return True


def _word(reader: Reader, give: Give, words: Mapping[str, str]) -> Steps[bool]:
    word = words.get((yield from reader.run(_WORD_CHARS, 8)))
    if word is None:
        return False
    give(word)
    return True


def _escape(reader: Reader, give: Give) -> Steps[bool]:
    reader.position += 1
    char = yield from reader.peek()
    if not char:
        return False
    reader.position += 1
    if size := _HEX_SIZES.get(char, 0):
        digits = yield from _digits(reader, size)
        if not digits and reader.is_ended:
            return False
        if len(digits) == size and int(digits, 16) < 0x110000:
            give(f"\\u{digits:0>4}" if size <= 4 else json.dumps(chr(int(digits, 16)))[1:-1])
        else:
            give("\\\\" + char + digits)
    elif (known := _ESCAPES.get(char)) is not None:
        give(known)
    else:
        give("\\\\" + json.dumps(char, ensure_ascii=False)[1:-1])
    return True


def _digits(reader: Reader, size: int) -> Steps[str]:
    """Up to `size` hexadecimal digits."""
    digits = ""
    while len(digits) < size and (yield from reader.more()):
        found = _HEX.match(reader.buffer, reader.position, reader.position + size - len(digits))
        if not found:
            break
        reader.position = found.end()
        digits += found.group()
    return digits


def _marked_string(reader: Reader, give: Give, mark: str) -> Steps[bool]:
    give('"')
    if not (yield from reader.until(_marker(mark), lambda text: give(json.dumps(text, ensure_ascii=False)[1:-1]))):
        return False
    reader.position += len(mark)
    give('"')
    return True


@cache
def _marker(mark: str) -> Markers:
    return Markers(mark)


def _members(reader: Reader, give: Give, dialect: Dialect, depth: int) -> Steps[bool]:
    opening = reader.buffer[reader.position]
    closing = "}" if opening == "{" else "]"
    reader.position += 1
    give(opening)
    yield from _space(reader, give)
    if (yield from reader.take(closing)):
        give(closing)
        return True
    while not reader.is_too_long:
        if opening == "{" and not (yield from _key(reader, give, dialect)):
            return False
        if not (yield from value(reader, give, dialect, depth + 1)):
            return False
        yield from _space(reader, give)
        found = yield from reader.take(",", closing)
        give(found)
        if found != ",":
            return found == closing
        yield from _space(reader, give)
    return False


def _key(reader: Reader, give: Give, dialect: Dialect) -> Steps[bool]:
    if dialect.mark and (yield from reader.peek()) != dialect.mark[0]:
        key = yield from reader.run(KEY_CHARS, 256)
        if not key:
            return False
        give(json.dumps(key, ensure_ascii=False))
    elif dialect.mark:
        if not (yield from reader.take(dialect.mark)) or not (yield from _marked_string(reader, give, dialect.mark)):
            return False
    elif not (yield from string(reader, give, dialect.quotes)):
        return False
    yield from _space(reader, give)
    if not (yield from reader.take(":")):
        return False
    give(":")
    yield from _space(reader, give)
    return True


def _space(reader: Reader, give: Give) -> Steps[None]:
    while not reader.is_too_long and (space := (yield from reader.space())):
        give(space)
