"""Custom tools, whose calls carry one text: models call them with an object of one string, as any other tool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from router.model_formats.grammar import INPUT, Schema

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEAD_CHARS = f'{{"{INPUT}":"'
_MAX_HEAD = 256  # characters, with white space
_TEXT = re.compile(r'(?:[^"\\]+|\\(?:[^u]|u[0-9a-fA-F]{4}))*', re.DOTALL)
_HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})\Z")  # of a character: the other may follow


def input_schema(text: Schema) -> dict[str, Any]:
    """Of the arguments. `text`: the schema of the string."""
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


class InputDecoder:
    """Gives the input while the JSON of the arguments comes. Arguments of another form come as they were written."""

    def __init__(self) -> None:
        self._held = ""  # the beginning of the arguments, or of an escape
        self._step: Callable[[str], str] = self._head

    def feed(self, text: str) -> str:
        return self._step(text)

    def _head(self, text: str) -> str:
        self._held += text
        if found := _HEAD.match(self._held):
            text, self._held, self._step = self._held[found.end() :], "", self._inner
            return self._step(text)
        if len(self._held) < _MAX_HEAD and _HEAD_CHARS.startswith("".join(self._held.split())):
            return ""
        text, self._held, self._step = self._held, "", str
        return text

    def _inner(self, text: str) -> str:
        whole = self._held + text
        found = _TEXT.match(whole)
        end = found.end() if found else 0
        if whole[end : end + 1] == '"':
            self._step = lambda _: ""  # what closes the object
        elif half := _HALF.search(whole, 0, end):
            end = half.start(1)
        self._held = whole[end:]
        return _unescaped(whole[:end])


def _unescaped(text: str) -> str:
    """Half characters become U+FFFD, as no text can hold them."""
    decoded = str(json.loads(f'"{text}"', strict=False))
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
