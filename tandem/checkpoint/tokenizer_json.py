"""Builds `tokenizer.json` of byte-level BPE tokenizers as plain data, in the format of Hugging Face tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]

BYTE_LEVEL: Final[Json] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY: Final[Json] = BYTE_LEVEL | {"use_regex": False}
DIGITS_THEN_BYTE_LEVEL: Final[Json] = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
}


def split_then_bytes(pattern: str) -> Json:
    """Splits words by a regular expression, then encodes them as bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES_ONLY]}


@dataclass(frozen=True, slots=True)
class BytePairTokenizer:
    """`pieces[id]` is the token; `special` and `added` (not special) are matched whole in the text before BPE."""

    pieces: Sequence[str]
    merges: Sequence[tuple[str, str]]
    special: Sequence[int] = ()
    added: Sequence[int] = ()
    pre_tokenizer: Mapping[str, Any] = field(default_factory=lambda: BYTE_LEVEL)
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    bos_token_id: int | None = None  # prepended to a bare prompt; None: nothing

    def to_json(self) -> Json:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        special = set(self.special)
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": each, "content": self.pieces[each], **flags, "special": each in special}
                for each in sorted(special | set(self.added))
            ],
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self._post_processor(),
            "decoder": BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self.ignore_merges,
                "vocab": {piece: number for number, piece in enumerate(self.pieces)},
                "merges": [list(pair) for pair in self.merges],
            },
        }

    def _post_processor(self) -> Json | None:
        if self.bos_token_id is None:
            return None
        bos = self.pieces[self.bos_token_id]
        first, second = ({"Sequence": {"id": each, "type_id": 0}} for each in ("A", "B"))
        before = {"SpecialToken": {"id": bos, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [before, first],
            "pair": [before, first, second],
            "special_tokens": {bos: {"id": bos, "ids": [self.bos_token_id], "tokens": [bos]}},
        }
