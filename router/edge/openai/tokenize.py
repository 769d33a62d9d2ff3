"""Requests of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.edge.openai.chat_messages import Messages, parse_messages
from router.edge.openai.request_schema import TemplateSettings
from router.edge.openai.tool_fields import Tools, parsed_tools, tool_use
from router.edge.strict_model import Items, StrictModel, at_most
from router.texts.chat import Chat
from tandem.errors import InputError

MAX_DETOKENIZED = 1 << 20


class TokenizeRequest(StrictModel):
    """Exactly one of `prompt` and `messages`. The chat template applies to messages, as in a chat."""

    model: str = ""  # optional if only one model is served
    prompt: str | None = None
    add_special_tokens: bool | None = None  # those that the checkpoint puts around a prompt; absent: true
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateSettings | None = None

    def parse(self) -> str | Chat:
        """Raises InputError, UnsupportedField."""
        if (self.prompt is None) == (self.messages is None):
            raise InputError("prompt: expected either prompt or messages", field="prompt")
        if self.messages is not None:
            if self.add_special_tokens is not None:
                raise InputError(
                    "add_special_tokens: expected only with prompt; the chat template adds its own",
                    field="add_special_tokens",
                )
            use = tool_use(parsed_tools(self.tools), None, None)
            return Chat(parse_messages(self.messages), use, self.chat_template_kwargs or {})
        return self.prompt or ""


class DetokenizeRequest(StrictModel):
    model: str = ""
    tokens: Annotated[Items[int], Field(max_length=MAX_DETOKENIZED), at_most(MAX_DETOKENIZED, "tokens")]
