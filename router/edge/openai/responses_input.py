"""The input of the Responses API as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from router.edge.strict_model import Items, StrictModel, type_of, unsupported
from router.texts.chat import Message, Part, custom_call, tool_call, tool_result
from router.texts.image_files import image_of_url
from router.texts.json_limits import check_texts
from tandem.errors import InputError


class TextContent(StrictModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str
    annotations: object = None  # of an earlier answer that the client sends again
    logprobs: object = None


class ImageContent(StrictModel):
    type: Literal["input_image"]
    image_url: str = Field(description="A data URL: `data:image/png;base64,...`. Nothing is fetched.")
    detail: Literal["auto"] | None = Field(None, description="The model decides.")
    file_id: None = None


Content = Annotated[
    Annotated[TextContent, Tag("Text")] | Annotated[ImageContent, Tag("Image")],
    Discriminator(lambda given: "Image" if type_of(given) == "input_image" else "Text"),
]


class InputItem(StrictModel):
    """A message, a call, the output of one, or the reasoning of an earlier answer. Others are refused."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = "message"
    role: str | None = None
    content: str | Items[Content] | None = None
    id: str | None = None
    status: str | None = None
    phase: object = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Items[TextContent] | None = None
    summary: object = None
    encrypted_content: object = None

    def check(self, path: str) -> None:
        """Raises InputError, UnsupportedField."""
        if self.type not in _ITEM_FIELDS:
            raise unsupported(f"{path}.type", f"value {self.type[:40]!r}", f"send {', '.join(_ITEM_FIELDS)}")
        if self.model_extra:
            field = f"{path}.{next(iter(self.model_extra))}"
            raise InputError(f"unknown field {field!r}", field=field)
        for field in _ITEM_FIELDS[self.type]:
            if getattr(self, field) is None:
                expected = "text" if field == "content" else f"a value in an item of type {self.type!r}"
                raise InputError(f"{path}.{field}: expected {expected}, got nothing", field=f"{path}.{field}")
        if self.type == "message" and self.role not in ("system", "developer", "user", "assistant"):
            raise InputError(
                f"{path}.role: expected system, developer, user or assistant, got {self.role!r}", field=f"{path}.role"
            )


_ITEM_FIELDS: dict[str, tuple[str, ...]] = {  # that each type must have
    "message": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}


def _text(content: str | Sequence[TextContent | ImageContent] | None, where: str) -> str:
    """Of text alone. Raises InputError."""
    return _message("", content, where).content


def _message(role: str, content: str | Sequence[TextContent | ImageContent] | None, where: str) -> Message:
    """Raises InputError."""
    if isinstance(content, str):
        return Message(role, content)
    parts: list[Part] = []
    for number, part in enumerate(content or ()):
        if isinstance(part, TextContent):
            parts.append(part.text)
            continue
        field = f"{where}.{number}.image_url"
        if role != "user":
            raise InputError(f"{field}: expected images only in messages of role 'user'", field=field)
        parts.append(image_of_url(part.image_url, field))
    return Message.of_parts(role, parts, {})


def parse_items(items: Sequence[InputItem]) -> list[Message]:
    """Reasoning and calls join the assistant's message that they stand at. Raises InputError, UnsupportedField."""
    given = ((f"input.{index}.arguments", item) for index, item in enumerate(items))
    check_texts([(field, item.arguments or "") for field, item in given if item.type == "function_call"])
    messages: list[Message] = []
    calls: set[str] = set()
    thoughts: list[str] = []  # of reasoning that no message has yet

    def assistant(last: Message, more: dict[str, Any]) -> Message:
        if thoughts:
            earlier = last.more.get("reasoning_content")
            more = {"reasoning_content": "\n".join(filter(None, [earlier, *thoughts])), **more}
            thoughts.clear()
        return replace(last, more={**last.more, **more})

    for index, item in enumerate(items):
        path = f"input.{index}"
        item.check(path)
        if thoughts and (item.type.endswith("_output") or (item.type == "message" and item.role != "assistant")):
            messages.append(assistant(Message("assistant", ""), {}))  # it has reasoned, and said nothing
        match item.type:
            case "reasoning":
                thoughts += filter(None, [_text(item.content, f"{path}.content")])
            case "message" if item.role == "assistant":
                messages.append(assistant(_message("assistant", item.content, f"{path}.content"), {}))
            case "message":
                role = "system" if item.role == "developer" else item.role or ""
                messages.append(_message(role, item.content, f"{path}.content"))
            case "function_call" | "custom_tool_call":
                call = _call(item, path)
                calls.add(item.call_id or "")
                is_more = bool(messages) and messages[-1].role == "assistant"
                last = messages.pop() if is_more else Message("assistant", "")
                messages.append(assistant(last, {"tool_calls": [*last.more.get("tool_calls", ()), call]}))
            case "function_call_output" | "custom_tool_call_output":
                text = _text(item.output, f"{path}.output")
                messages.append(tool_result(item.call_id, calls, text, f"{path}.call_id"))
    if thoughts:
        messages.append(assistant(Message("assistant", ""), {}))
    return messages


def _call(item: InputItem, path: str) -> dict[str, Any]:
    call_id, name = item.call_id or "", item.name or ""
    if item.type == "custom_tool_call":
        return custom_call(call_id, name, item.input or "")
    return tool_call(call_id, name, item.arguments or "", f"{path}.arguments")
