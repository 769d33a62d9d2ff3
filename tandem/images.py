"""Images in prompts. Torch-free.

A model reads an image in place of placeholder tokens. How many there are depends on the model and on the image, so an
engine expands a prompt, in which the chat template has put a marker for each image, before the request is placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tandem.errors import InputError

MAX_IMAGES = 16  # of a request
MAX_IMAGES_BYTES = 32 << 20  # of all images of a request together: one message to a worker has them
DIGEST_BYTES = 32
_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")
FORMATS = "PNG, JPEG, WebP or GIF"


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image that the model reads in place of `tokens` prompt tokens, from position `start` on. `data`: its file, as
    the client sent it; `digest`: of that file."""

    start: int
    tokens: int
    data: bytes = field(repr=False)
    digest: bytes

    @classmethod
    def of(cls, start: int, tokens: int, data: bytes) -> PromptImage:
        return cls(start, tokens, data, blake2b(data, digest_size=DIGEST_BYTES).digest())


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """`spans`: of each image, in order: the position of its first placeholder token, and how many there are."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def has_known_format(data: bytes) -> bool:
    """Whether a file begins as one of FORMATS."""
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return is_webp or any(data.startswith(each) for each in _BEGINNINGS)


def check_spans(spans: Sequence[tuple[int, int]], prompt_tokens: int) -> None:
    """Raises InputError unless they follow each other within the prompt."""
    end = 0
    for start, tokens in spans:
        if start < end or tokens < 1 or start + tokens > prompt_tokens:
            raise InputError(
                f"images: expected placeholders that follow each other within {prompt_tokens} tokens", field="images"
            )
        end = start + tokens
