"""Requests of the Responses API: text, images and functions, nothing is stored. A field that needs tools of the server,
other media or a stored conversation is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from router.edge.openai.request_schema import (
    MAX_TOKENS_HELP,
    CacheSalt,
    StreamOptions,
    TemplateSettings,
)
from router.edge.openai.tool_fields import (
    FORM_HELP,
    AllowedTools,
    AllowedToolsChoice,
    AnyText,
    FunctionFields,
    GrammarFields,
    Name,
    NamedCustomTool,
    NamedTool,
    ToolChoice,
    ToolName,
    branch,
    form_branch,
    tool_use,
)
from router.edge.strict_model import (
    Items,
    StrictModel,
    at_most,
    equals,
    is_empty,
    never,
    refuse_unsupported,
    type_of,
    unsupported,
)
from router.requests.raw_request import RawRequest, RawSampling
from router.texts.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Chat,
    Effort,
    Message,
    Part,
    Tool,
    ToolUse,
    custom_call,
    tool_call,
    tool_result,
)
from router.texts.image_files import image_of_url
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, json_object, json_schema
from tandem.request import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
# What there is none of, as nothing is stored and no tool runs here.
_HARMLESS_INCLUDES = frozenset(
    [
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    ]
)


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


def _is_clients(given: object) -> object:
    """Tools that run at a server have other fields."""
    if isinstance(given, dict) and given.get("type") not in ("function", "custom", None):
        remedy = "offer it as a function or a custom tool, which the client runs"
        raise unsupported("tools", f"type {str(given['type'])[:40]!r}", remedy)
    return given


class ResponsesTool(FunctionFields):
    type: Literal["function"]


class FlatGrammarFormat(GrammarFields):
    type: Literal["grammar"]


class ResponsesCustomTool(StrictModel):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: (
        Annotated[
            Annotated[FlatGrammarFormat, Tag("Grammar")] | Annotated[AnyText, Tag("AnyText")],
            Discriminator(form_branch),
        ]
        | None
    ) = Field(None, description=FORM_HELP)

    def tool(self, where: str) -> Tool:
        """`where`: the client's field of this tool. Raises InputError."""
        form = self.format
        if not isinstance(form, FlatGrammarFormat):
            return Tool.custom(self.name, self.description, None, "", where)
        return Tool.custom(self.name, self.description, form.syntax, form.definition, f"{where}.format.definition")


class FunctionChoice(StrictModel):
    type: Literal["function", "custom"]
    name: str


class AllowedChoice(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        Items[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tool_choice")
    ]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema", description="JSON Schema, draft 2020-12.")
    strict: bool | None = Field(None, description="No effect: every answer satisfies its schema.")

    def constraint(self) -> Constraint | None:
        """Raises InputError."""
        if self.type == "json_schema":
            return json_schema(self.schema_, "text.format.schema")
        if self.schema_ is not None:
            raise InputError("text.format.schema: expected only with type 'json_schema'", field="text.format.schema")
        return json_object("text.format") if self.type == "json_object" else None


class TextSettings(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="No effect.")


class ReasoningFields(StrictModel):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(StrictModel):
    model: str
    input: Annotated[
        str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)], at_most(MAX_MESSAGES, "input")
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description=MAX_TOKENS_HELP)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions, as in the other APIs.
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: no limit.")
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    cache_salt: CacheSalt = None
    # No effect on the answer. Requests with the same prompt_cache_key or user prefer the same workers.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None  # ignored: nothing is stored
    prompt_cache_retention: str | None = Field(None, description="No effect: the prefix cache is automatic.")
    image: dict[str, Any] | None = Field(None, description="No effect.")
    # Refused unless the value changes nothing.
    access_programs: object = None
    background: bool | None = None
    background_options: object = None
    context_management: object = None
    conversation: object = None
    max_tool_calls: object = None
    moderation: object = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: object = None
    prompt_cache_options: object = None
    reasoning: ReasoningFields | None = None
    text: TextSettings | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    tools: (
        Annotated[
            Items[
                Annotated[
                    Annotated[ResponsesTool, Tag("Function")] | Annotated[ResponsesCustomTool, Tag("Custom")],
                    Discriminator(branch),
                    BeforeValidator(_is_clients),
                ]
            ],
            Field(max_length=MAX_TOOLS),
            at_most(MAX_TOOLS, "tools"),
        ]
        | None
    ) = None
    chat_template_kwargs: TemplateSettings | None = None
    truncation: str | None = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def parse(self) -> RawRequest:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL)
        other = next((each for each in self.include or () if each not in (LOGPROBS, *_HARMLESS_INCLUDES)), None)
        if other is not None:
            raise unsupported("include", f"value {other[:80]!r}")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InputError(f"top_logprobs: expected only together with include={LOGPROBS!r}", field="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: expected only together with stream=true", field="stream_options")
        messages = [Message("user", self.input)] if isinstance(self.input, str) else parse_items(self.input)
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        sampling = RawSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            constraint=None if self.text is None or self.text.format is None else self.text.format.constraint(),
        )
        session = self.prompt_cache_key or self.user or ""
        settings = self.chat_template_kwargs or {}
        chat = Chat(tuple(messages), self._tools(), settings, self.effort, effort_field="reasoning.effort")
        return RawRequest(self.model, chat, sampling, session, self.cache_salt or "")

    def _tools(self) -> ToolUse | None:
        """Raises InputError, UnsupportedField."""
        tools = [tool.tool(f"tools.{number}") for number, tool in enumerate(self.tools or ())]
        return tool_use(tools, self._choice(), self.parallel_tool_calls)

    def _choice(self) -> ToolChoice | None:
        """As chat completions send it."""
        match self.tool_choice:
            case FunctionChoice():
                return _named(self.tool_choice)
            case AllowedChoice():
                tools = [_named(each) for each in self.tool_choice.tools]
                allowed = AllowedTools(mode=self.tool_choice.mode, tools=tools)
                return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
            case other:
                return other


def _named(choice: FunctionChoice) -> NamedTool | NamedCustomTool:
    if choice.type == "custom":
        return NamedCustomTool(type="custom", custom=ToolName(name=choice.name))
    return NamedTool(type="function", function=ToolName(name=choice.name))


_NEUTRAL = {
    "access_programs": never,
    "background": equals(False),
    "background_options": equals({}, {"completion_window": "soonest"}),
    "context_management": is_empty,
    "conversation": never,
    "max_tool_calls": never,
    "moderation": never,
    "previous_response_id": never,
    "prompt": never,
    "prompt_cache_options": equals({}, {"mode": "implicit"}),
    "truncation": equals("disabled"),
}
