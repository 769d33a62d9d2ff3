"""Special tokens that a client's text spells out stay text: they could begin a turn of another role otherwise.

Their occurrences are marked before the template renders the text, so that those of the template can be told apart, and
the tokenizer gets the text in parts that are cut at the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.text.tokenizer import Tokenizer

MARK = "\ufdd0"  # no character of any text, by Unicode
INVISIBLE = "\u200b"  # zero-width space


class SpecialTexts:
    """Args: `texts`: of the special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted((each for each in texts if len(each) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def mark(self, value: Any) -> Any:
        """Marks each special token in the texts of JSON, behind its first character."""
        if isinstance(value, str):
            text = value.replace(MARK, "")
            return self._pattern.sub(lambda found: f"{found[0][0]}{MARK}{found[0][1:]}", text)
        if isinstance(value, list | tuple):
            return [self.mark(each) for each in value]
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        return value


def encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered text. Raises InputError as the tokenizer does."""
    if MARK not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    if not tokenizer.is_byte_level:  # it may add a space before each part
        return tokenizer.encode(text.replace(MARK, INVISIBLE), add_special_tokens=False)
    parts = text.split(MARK)
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
