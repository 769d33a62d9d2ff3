"""Chats over gRPC: tools and earlier calls in, calls and reasoning out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.model_formats.events import CallArguments, CallStarted, Event, Reasoning, Text
from router.model_formats.grammar import Mode
from router.requests.answers import AnswerReader
from router.texts.chat import (
    EFFORTS,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TOOL_NAME,
    Chat,
    Message,
    Part,
    Tool,
    ToolUse,
    tool_call,
    tool_result,
)
from router.texts.image_files import checked_image
from router.texts.json_limits import check_texts
from tandem.errors import InputError
from tandem.request import check_length
from tandem.v1 import inference_pb2 as pb

ROLES = ("system", "developer", "user", "assistant", "tool")
_MODES = {pb.ToolChoice.MODE_AUTO: Mode.AUTO, pb.ToolChoice.MODE_NONE: None, pb.ToolChoice.MODE_REQUIRED: Mode.REQUIRED}


def chat_of(chat: pb.ChatMessages) -> Chat:
    """Raises InputError."""
    check_length("chat", len(chat.messages), MAX_MESSAGES)
    check_length("tools", len(chat.tools), MAX_TOOLS)
    check_texts(_json_texts(chat))
    calls: set[str] = set()
    messages = tuple(_message(each, calls, f"chat.messages.{index}") for index, each in enumerate(chat.messages))
    effort = chat.reasoning_effort or None
    if effort is not None and effort not in EFFORTS:
        raise InputError(
            f"reasoning_effort: expected one of {', '.join(EFFORTS)}, got {effort[:40]!r}", field="reasoning_effort"
        )
    return Chat(messages, _use(chat), _settings(chat.template_settings), effort, settings_field="template_settings")


def _json_texts(chat: pb.ChatMessages) -> list[tuple[str, str]]:
    """Each after its field."""
    calls = (
        (f"chat.messages.{index}.tool_calls.{number}.arguments", call.arguments)
        for index, message in enumerate(chat.messages)
        for number, call in enumerate(message.tool_calls)
    )
    tools = ((f"tools.{number}.parameters", tool.parameters) for number, tool in enumerate(chat.tools))
    return [*calls, *tools, ("template_settings", chat.template_settings)]


def _message(given: pb.ChatMessage, calls: set[str], where: str) -> Message:
    """`calls`: ids of the calls before it, to which its own are added."""
    if given.role not in ROLES:
        raise InputError(
            f"{where}.role: expected {', '.join(ROLES[:-1])} or {ROLES[-1]}, got {given.role[:40]!r}",
            field=f"{where}.role",
        )
    of_roles = (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool"), ("parts", "user"))
    for name, role in of_roles:
        if getattr(given, name) and given.role != role:
            raise InputError(f"{where}.{name}: expected only with role {role!r}", field=f"{where}.{name}")
    if given.role == "tool":
        return tool_result(given.tool_call_id, calls, given.content, f"{where}.tool_call_id")
    check_length(f"{where}.tool_calls", len(given.tool_calls), MAX_CALLS)
    more: dict[str, Any] = {"reasoning_content": given.reasoning} if given.reasoning else {}
    if given.tool_calls:
        more["tool_calls"] = [
            tool_call(call.id, call.name, call.arguments, f"{where}.tool_calls.{number}.arguments")
            for number, call in enumerate(given.tool_calls)
        ]
        calls.update(call.id for call in given.tool_calls)
    if given.parts:
        return Message.of_parts(given.role, _parts(given, where), more)
    return Message("system" if given.role == "developer" else given.role, given.content, more)


def _parts(given: pb.ChatMessage, where: str) -> list[Part]:
    if given.content:
        field = f"{where}.parts"
        raise InputError(f"{field}: expected no content beside it", field=field)
    check_length(f"{where}.parts", len(given.parts), MAX_MESSAGES)
    return [
        each.text if each.WhichOneof("part") == "text" else checked_image(each.image, f"{where}.parts.{number}.image")
        for number, each in enumerate(given.parts)
    ]


def _use(chat: pb.ChatMessages) -> ToolUse | None:
    choice = chat.tool_choice
    if not chat.tools:
        if choice.names or choice.mode == pb.ToolChoice.MODE_REQUIRED:
            raise InputError("tool_choice: expected tools beside it, got none", field="tool_choice")
        return None
    tools = [_tool(each, f"tools.{number}") for number, each in enumerate(chat.tools)]
    if choice.mode not in _MODES:
        raise InputError(f"tool_choice.mode: expected a known mode, got {choice.mode}", field="tool_choice.mode")
    is_named = choice.mode == pb.ToolChoice.MODE_REQUIRED and len(choice.names) == 1
    is_parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else not is_named
    return ToolUse.parse(tools, _MODES[choice.mode], [*choice.names] or None, is_parallel)


def _tool(given: pb.Tool, where: str) -> Tool:
    if not re.fullmatch(TOOL_NAME, given.name):
        field = f"{where}.name"
        raise InputError(f"{field}: expected {TOOL_NAME}, got {given.name[:80]!r}", field=field)
    field = f"{where}.parameters"
    schema = parsed_json(given.parameters, field) if given.parameters else None
    return Tool.parse(given.name, schema, given.description or None, is_strict=given.strict, where=field)


def _settings(text: str) -> Mapping[str, Any]:
    settings = parsed_json(text, "template_settings") if text else {}
    if not isinstance(settings, dict):
        raise InputError("template_settings: expected a JSON object", field="template_settings")
    return settings


def parsed_json(text: str, field: str) -> Any:
    """Raises InputError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field}: expected JSON: {error}", field=field) from None


class ChatParts:
    """Puts the parts of one answer into its chunks."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def chunk(self, response: pb.GenerateResponse) -> pb.GenerateResponse:
        """Replaces the answer's text in `response` by what it is part of."""
        chunk, text = response.chunk, response.chunk.text
        chunk.text = ""
        chunk.ClearField("text_ends")
        self._fill(chunk, self._reader.feed(text))
        return response

    def rest(self) -> pb.GenerateResponse | None:
        """What was held back until the end."""
        if not (events := self._reader.finish()):
            return None
        response = pb.GenerateResponse(chunk=pb.Chunk())
        self._fill(response.chunk, events)
        return response

    def _fill(self, chunk: pb.Chunk, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Text():
                    chunk.text += event.text
                case Reasoning():
                    chunk.reasoning += event.text
                case CallStarted():
                    chunk.tool_calls.add(index=event.index, id=self._reader.call_id(event), name=event.name)
                case CallArguments():
                    last = chunk.tool_calls[-1] if chunk.tool_calls else None
                    if last is None or last.index != event.index:
                        last = chunk.tool_calls.add(index=event.index)
                    last.arguments += event.text
