"""Requests of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.edge.openai.schema import Items, Messages, Strict, at_most
from router.requests.request import Message
from tandem.errors import InputError

MAX_DETOKENIZED = 1 << 20


class TokenizeRequest(Strict):
    """Exactly one of `prompt` and `messages`; messages go through the chat template, as they would in a chat."""

    model: str = ""  # may be left out where only one is served
    prompt: str | None = None
    add_special_tokens: bool | None = None  # of a prompt: what the checkpoint puts around it; absent: true
    messages: Messages | None = None

    def parse(self) -> str | tuple[Message, ...]:
        """Raises InputError, UnsupportedField."""
        if (self.prompt is None) == (self.messages is None):
            raise InputError("prompt: expected either prompt or messages", field="prompt")
        if self.messages is not None:
            if self.add_special_tokens is not None:
                raise InputError(
                    "add_special_tokens: expected only with prompt; the template of a chat has its own",
                    field="add_special_tokens",
                )
            return tuple(message.parse(index) for index, message in enumerate(self.messages))
        return self.prompt or ""


class DetokenizeRequest(Strict):
    model: str = ""
    tokens: Annotated[Items[int], Field(max_length=MAX_DETOKENIZED), at_most(MAX_DETOKENIZED, "tokens")]
