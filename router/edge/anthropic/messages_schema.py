"""Requests of Anthropic's Messages API. A field is either served or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from router.edge.openai.tool_fields import NamedTool, ToolChoice, ToolName, run_by_clients, tool_use
from router.edge.strict_model import (
    Items,
    StrictModel,
    at_most,
    equals,
    is_empty,
    never,
    refuse_unsupported,
    unsupported,
)
from router.requests.raw_request import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, RawRequest, RawSampling
from router.texts.chat import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    THINKING,
    Chat,
    Message,
    Part,
    Tool,
    parsed_call,
    tool_result,
)
from router.texts.image_files import image_of_base64
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, json_schema

# Per type of block: the fields that it must have, and those that it may have.
_BLOCKS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "text": (frozenset(["text"]), frozenset(["citations"])),
    "image": (frozenset(["source"]), frozenset()),
    "thinking": (frozenset(["thinking"]), frozenset(["signature"])),
    "tool_use": (frozenset(["id", "name", "input"]), frozenset(["caller", "toolset_name"])),
    "tool_result": (frozenset(["tool_use_id"]), frozenset(["content", "is_error", "toolset_name"])),
}
_COMMON = frozenset(["type", "cache_control"])
_ROLES = {  # the blocks of each
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_CACHE_HELP = "No effect: every prefix is cached."


class CacheControl(StrictModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ContentBlock(StrictModel):
    """`text`, `image`, `thinking`, `tool_use` or `tool_result`. Others are refused."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None
    citations: object = None  # of an earlier answer that the client sends again
    source: dict[str, Any] | None = Field(None, description="Of an image: `type` is `base64`. Nothing is fetched.")
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: object = None
    tool_use_id: str | None = None
    content: Content | None = None
    is_error: bool | None = Field(None, description="The model reads `Error:` before the result.")
    toolset_name: str | None = None
    cache_control: CacheControl | None = Field(None, description=_CACHE_HELP)

    def check(self, path: str, known: Sequence[str]) -> None:
        """`known`: the types of blocks that may stand here. Raises InputError, UnsupportedField."""
        if self.type not in known:
            raise unsupported(f"{path}.type", f"value {self.type[:40]!r}", f"send blocks of type {', '.join(known)}")
        required, optional = _BLOCKS[self.type]
        if unknown := sorted(self.model_fields_set.union(self.model_extra or ()) - required - optional - _COMMON):
            field = f"{path}.{unknown[0][:80]}"
            raise InputError(f"unknown field {field!r}", field=field)
        for name in sorted(required):
            if getattr(self, name) is None:
                field = f"{path}.{name}"
                raise InputError(f"{field}: expected a value in a block of type {self.type!r}", field=field)
        if self.toolset_name is not None:
            raise unsupported(f"{path}.toolset_name")
        if self.caller is not None and self.caller != {"type": "direct"}:
            raise unsupported(f"{path}.caller")


Blocks = Annotated[Items[ContentBlock], Field(max_length=MAX_MESSAGES)]
Content = Annotated[str | Blocks, at_most(MAX_MESSAGES, "content")]


class MessageParam(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Content


def _blocks(content: str | Sequence[ContentBlock], path: str, known: Sequence[str]) -> list[tuple[str, ContentBlock]]:
    """With their fields. Raises InputError, UnsupportedField."""
    if isinstance(content, str):
        return [(path, ContentBlock(type="text", text=content))]
    found = [(f"{path}.{number}", block) for number, block in enumerate(content)]
    for where, block in found:
        block.check(where, known)
    return found


def _text(content: str | Sequence[ContentBlock] | None, path: str) -> str:
    """Of blocks that are text alone. Raises InputError, UnsupportedField."""
    return "\n".join(block.text or "" for _, block in _blocks(content or "", path, ("text",)))


def _user_messages(blocks: Sequence[tuple[str, ContentBlock]], calls: set[str]) -> Iterator[Message]:
    """One per result of a tool, and one per text and images between them. Raises InputError, UnsupportedField."""
    if not blocks:
        yield Message("user", "")
    for is_result, group in groupby(blocks, lambda each: each[1].type == "tool_result"):
        if not is_result:
            parts = [_part(block, where) for where, block in group]
            yield Message.of_parts("user", parts, {}, between="\n")
            continue
        for where, block in group:
            text = _text(block.content, f"{where}.content")
            text = f"Error: {text}" if block.is_error else text
            yield tool_result(block.tool_use_id, calls, text, f"{where}.tool_use_id")


def _part(block: ContentBlock, where: str) -> Part:
    """Raises InputError."""
    if block.source is None:
        return block.text or ""
    source, path = block.source, f"{where}.source"
    if source.get("type") != "base64":
        raise unsupported(f"{path}.type", f"value {str(source.get('type'))[:40]!r}", "send base64: nothing is fetched")
    if unknown := sorted(source.keys() - {"type", "media_type", "data"}):
        raise InputError(f"unknown field '{path}.{unknown[0][:80]}'", field=f"{path}.{unknown[0][:80]}")
    if source.get("media_type") not in _MEDIA_TYPES:
        raise InputError(
            f"{path}.media_type: expected one of {', '.join(_MEDIA_TYPES)}, got {str(source.get('media_type'))[:40]!r}",
            field=f"{path}.media_type",
        )
    if not isinstance(source.get("data"), str):
        raise InputError(f"{path}.data: expected base64", field=f"{path}.data")
    return image_of_base64(source["data"], f"{path}.data")


def _assistant_message(blocks: Sequence[tuple[str, ContentBlock]], calls: set[str]) -> Message:
    """`calls`: ids of the calls before it, to which its own are added. Raises InputError."""
    each = [block for _, block in blocks]
    more: dict[str, Any] = {}
    uses = [block for block in each if block.type == "tool_use"]
    if len(uses) > MAX_CALLS:
        raise InputError(f"messages: expected at most {MAX_CALLS} calls in a turn, got {len(uses)}", field="messages")
    if called := [parsed_call(block.id or "", block.name or "", block.input or {}) for block in uses]:
        more["tool_calls"] = called
        calls.update(call["id"] for call in called)
    if reasoning := "".join(block.thinking or "" for block in each):
        more["reasoning_content"] = reasoning
    return Message("assistant", "".join(block.text or "" for block in each), more)


def parse_messages(messages: Sequence[MessageParam]) -> list[Message]:
    """Messages of one role that follow each other are one turn. Raises InputError, UnsupportedField."""
    parsed: list[Message] = []
    calls: set[str] = set()
    turns = groupby(enumerate(messages), lambda each: each[1].role)
    for role, turn in turns:
        blocks = [
            block
            for index, message in turn
            for block in _blocks(message.content, f"messages.{index}.content", _ROLES[role])
        ]
        match role:
            case "user":
                parsed += _user_messages(blocks, calls)
            case "assistant":
                parsed.append(_assistant_message(blocks, calls))
            case _:
                parsed.append(Message(role, "\n".join(block.text or "" for _, block in blocks)))
    return parsed


class ToolParam(StrictModel):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: Annotated[dict[str, Any], Field(description="JSON Schema of the input.")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = Field(None, description="The input of every call satisfies `input_schema`.")
    cache_control: CacheControl | None = Field(None, description=_CACHE_HELP)
    eager_input_streaming: bool | None = Field(None, description="No effect: inputs are streamed as they come.")
    # Refused unless the value changes nothing.
    allowed_callers: object = None
    defer_loading: object = None
    input_examples: object = None

    def tool(self, where: str) -> Tool:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL_TOOL, f"{where}.")
        field = f"{where}.input_schema"
        return Tool.parse(self.name, self.input_schema, self.description, is_strict=bool(self.strict), where=field)


class ToolChoiceParam(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of type `tool`: the tool to call.")
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call in an answer.")

    def choice(self) -> ToolChoice:
        """As chat completions send it. Raises InputError."""
        if (self.name is not None) != (self.type == "tool"):
            raise InputError("tool_choice.name: expected exactly with type 'tool'", field="tool_choice.name")
        match self.type:
            case "tool":
                return NamedTool(type="function", function=ToolName(name=self.name or ""))
            case "any":
                return "required"
            case other:
                return other


class ThinkingParam(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="No effect: `max_tokens` limits reasoning and answer together."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: blocks of reasoning come without their text."
    )


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema", description="JSON Schema, draft 2020-12.")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Of the reasoning, if the model's chat template has a setting for it."
    )
    format: OutputFormat | None = None


class Metadata(StrictModel):
    user_id: str | None = Field(None, description="Requests with the same one prefer the same workers.")


class CountTokensRequest(StrictModel):
    """The fields that a prompt is made of."""

    model: str
    messages: Annotated[
        Items[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES), at_most(MAX_MESSAGES, "messages")
    ]
    system: Content | None = None
    tools: (
        Annotated[
            Items[Annotated[ToolParam, run_by_clients("custom", offered_as="a tool with an input_schema")]],
            Field(max_length=MAX_TOOLS),
            at_most(MAX_TOOLS, "tools"),
        ]
        | None
    ) = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The same as `output_config.format`.")
    cache_control: CacheControl | None = Field(None, description=_CACHE_HELP)
    # Refused unless the value changes nothing.
    context_management: object = None
    mcp_servers: object = None
    speed: object = None

    def chat(self) -> Chat:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL)
        messages = parse_messages(self.messages)
        if system := _text(self.system, "system"):
            messages.insert(0, Message("system", system))
        tools = [tool.tool(f"tools.{number}") for number, tool in enumerate(self.tools or ())]
        choice = None if self.tool_choice is None else self.tool_choice.choice()
        is_parallel = self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use
        return Chat(tuple(messages), tool_use(tools, choice, is_parallel), wishes=self._wishes())

    def _wishes(self) -> dict[str, Any]:
        wishes: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            wishes |= dict.fromkeys(THINKING, self.thinking.type == "enabled")
        if self.output_config is not None and (effort := self.output_config.effort) is not None:
            wishes["reasoning_effort"] = "xhigh" if effort == "max" else effort
        return wishes


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)] = Field(
        description="If it is more than what the prompt leaves of the context, the answer may end with "
        "`model_context_window_exceeded`."
    )
    stop_sequences: (
        Annotated[
            Items[Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]],
            Field(max_length=MAX_STOP_STRINGS),
            at_most(MAX_STOP_STRINGS, "stop_sequences"),
        ]
        | None
    ) = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="No effect.")
    # Refused unless the value changes nothing.
    container: object = None
    diagnostics: object = None
    inference_geo: object = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL_MESSAGE)
        if self.messages[-1].role == "assistant":
            field = f"messages.{len(self.messages) - 1}.role"
            raise unsupported(field, "to continue an assistant's message", "end with a message of role 'user'")
        sampling = RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            may_fill_context=True,
            stop=tuple(self.stop_sequences or ()),
            constraint=self._constraint(),
        )
        session = (self.metadata.user_id if self.metadata is not None else None) or ""
        return RawRequest(self.model, self.chat(), sampling, session)

    def _constraint(self) -> Constraint | None:
        """Raises InputError."""
        inner = None if self.output_config is None else self.output_config.format
        if inner is not None and self.output_format is not None:
            raise InputError(
                "output_format: expected only one of it and output_config.format; leave output_format out",
                field="output_format",
            )
        if inner is not None:
            return json_schema(inner.schema_, "output_config.format.schema")
        return None if self.output_format is None else json_schema(self.output_format.schema_, "output_format.schema")


def _keeps_all(value: object) -> bool:
    """Claude Code asks for it: the thinking of all turns stays."""
    kept = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
    return (
        isinstance(value, dict)
        and not value.keys() - {"edits"}
        and all(edit in kept for edit in value.get("edits") or ())
    )


_NEUTRAL = {
    "context_management": _keeps_all,
    "mcp_servers": is_empty,
    "speed": equals("standard"),
}
_NEUTRAL_MESSAGE = {
    "container": never,
    "diagnostics": equals({}, {"previous_message_id": None}),
    "inference_geo": never,
}
_NEUTRAL_TOOL = {
    "allowed_callers": equals(["direct"]),
    "defer_loading": equals(False),
    "input_examples": is_empty,
}
