"""The messages of a chat, as chat completions send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from router.edge.openai.tool_fields import EarlierCalls, EarlierToolCall
from router.edge.strict_model import Items, StrictModel, at_most, type_of, unsupported
from router.texts.chat import MAX_MESSAGES, Message, Part, tool_result
from router.texts.image_files import image_of_url
from router.texts.json_limits import check_texts
from tandem.errors import InputError


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: object = None  # no effect: the prefix cache is automatic


class ImageUrl(StrictModel):
    url: str = Field(description="A data URL: `data:image/png;base64,...`. Nothing is fetched.")
    detail: Literal["auto"] | None = Field(None, description="The model decides.")


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[ImagePart, Tag("Image")],
    Discriminator(lambda given: "Image" if type_of(given) == "image_url" else "Text"),
]


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    id: str | None = None  # of an earlier answer that the client sends again, as the following
    refusal: str | None = None
    audio: object = None
    annotations: object = None
    parsed: object = None  # what OpenAI's SDKs read from the content
    tool_calls: EarlierCalls | None = None
    tool_call_id: str | None = Field(None, description="Of a message of role `tool`: the call that it answers.")
    function_call: object = None
    reasoning_content: str | None = Field(None, description="Of an earlier answer.")
    reasoning: str | None = Field(None, description="The same as `reasoning_content`, as other servers name it.")

    def parse(self, index: int, calls: set[str]) -> Message:
        """`calls`: ids of the calls before it, to which its own are added. Raises InputError, UnsupportedField."""
        where = f"messages.{index}"
        for field in ("function_call", "audio"):
            if getattr(self, field):
                raise unsupported(f"{where}.{field}")
        if self.role == "function":
            raise unsupported(f"{where}.role", f"value {self.role!r}", "send messages of role 'tool'")
        if self.content is None and not self.tool_calls:
            raise InputError(f"{where}.content: expected text, got nothing", field=f"{where}.content")
        role, more = "system" if self.role == "developer" else self.role, self._more(where, calls)
        if isinstance(self.content, list):
            return Message.of_parts(role, self._parts(self.content, f"{where}.content"), more)
        return Message(role, self.content or "", more)

    def _parts(self, content: Sequence[TextPart | ImagePart], where: str) -> list[Part]:
        parts: list[Part] = []
        for number, part in enumerate(content):
            if isinstance(part, TextPart):
                parts.append(part.text)
                continue
            field = f"{where}.{number}.image_url"
            if self.role != "user":
                raise InputError(f"{field}: expected images only with role 'user'", field=field)
            parts.append(image_of_url(part.image_url.url, f"{field}.url"))
        return parts

    def _more(self, where: str, calls: set[str]) -> dict[str, Any]:
        """What the chat template reads beside role and content."""
        more: dict[str, Any] = {} if self.name is None else {"name": self.name}
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) and self.role != role:
                raise InputError(f"{where}.{field}: expected only with role {role!r}", field=f"{where}.{field}")
        if self.tool_calls:
            more["tool_calls"] = [
                call.for_template(f"{where}.tool_calls.{number}") for number, call in enumerate(self.tool_calls)
            ]
            calls.update(call.id for call in self.tool_calls)
        if self.role == "tool":
            more.update(tool_result(self.tool_call_id, calls, "", f"{where}.tool_call_id").more)
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            more["reasoning_content"] = reasoning
        return more


def parse_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Raises InputError, UnsupportedField."""
    check_texts(
        [
            (f"messages.{index}.tool_calls.{number}.function.arguments", call.function.arguments)
            for index, message in enumerate(messages)
            for number, call in enumerate(message.tool_calls or ())
            if isinstance(call, EarlierToolCall)
        ]
    )
    calls: set[str] = set()
    return tuple(message.parse(index, calls) for index, message in enumerate(messages))


Messages = Annotated[
    Items[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES, "messages")
]
