"""Converts text to token ids and back. Only this module and tokenizer_words import `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from tandem.errors import CheckpointError, InputError
from tandem.text.tokenizer_words import WordCache

TOKENIZER_FILE = "tokenizer.json"
MAX_FILE_BYTES = 256 << 20


def missing_tokenizer(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected a tokenizer file, found none; the model's page has it, or `AutoTokenizer.from_pretrained("
        "FOLDER).save_pretrained(FOLDER)` of transformers writes it",
        field="model",
    )


class Tokenizer:
    """A checkpoint's `tokenizer.json`. Thread-safe; encode and decode release the interpreter lock."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A file may request truncation or padding from training; a server needs the whole prompt.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        self._size = inner.get_vocab_size(with_added_tokens=True)
        self._words = WordCache.of(inner)
        # Whether a token means the same bytes everywhere, and the texts of tokens that are whole characters.
        self.is_byte_level = isinstance(inner.decoder, tokenizers.decoders.ByteLevel)
        self._fixed: dict[int, str | None] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises CheckpointError naming the file."""
        path = model_dir / TOKENIZER_FILE
        if not path.is_file():
            raise missing_tokenizer(path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception for every error in the file
            raise CheckpointError(f"{path}: expected a tokenizer, got: {error}", field="model") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes text. Raises InputError for text that is not Unicode (lone surrogates).

        `add_special_tokens` adds the checkpoint's tokens around a bare prompt, often a BOS. The text of a chat template
        contains them already.
        """
        try:
            if not add_special_tokens and self._words is not None:
                found = self._words.encode(text)
                if found is not None:
                    return found
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InputError(f"prompt: expected Unicode text, got a lone surrogate: {error}", field="prompt") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes ids. An id without a token gives no text (a model may have more rows than its tokenizer); an
        incomplete UTF-8 sequence gives U+FFFD."""
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def fixed_text(self, token_id: int) -> str | None:
        """The text the token always adds, "" for special tokens; None if it depends on its neighbours."""
        if not self.is_byte_level or token_id >= self._size:
            return None
        try:
            return self._fixed[token_id]
        except KeyError:
            text = self.decode([token_id])
            fixed = self._fixed[token_id] = None if "\ufffd" in text else text
            return fixed

    def token(self, token_id: int) -> str | None:
        """The token as written in the vocabulary; None for an id without a token."""
        piece: str | None = self._inner.id_to_token(token_id)
        return piece

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; the model may have more rows."""
        return self._size
