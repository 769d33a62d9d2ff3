"""A chat as clients send it: messages, tools, and settings of the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args

from router.model_formats.custom_input import input_schema
from router.model_formats.grammar import INPUT, Mode, Schema
from tandem.errors import InputError
from tandem.grammar.constraint import TextGrammar, any_schema

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS: tuple[str, ...] = get_args(Effort)
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 256  # of one message
TOOL_NAME = "^[a-zA-Z0-9_.-]{1,64}$"
THINKING = ("enable_thinking", "thinking")  # names that templates have for a setting that turns it on

# The prompt for models whose template knows no tools: as Hermes and Qwen write it.
_DESCRIPTION = """# Tools

You may call one or more functions to help with the user's request. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call return a JSON object with the function's name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-as-json-object>}}
</tool_call>"""


Part = str | bytes  # a text, or an image's file


@dataclass(frozen=True, slots=True)
class Message:
    """`more`: what the template reads beside role and content: `tool_calls` with parsed arguments, `tool_call_id`,
    `name`, `reasoning_content`. `parts`: of a message with images, whose text `content` is then."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_parts(cls, role: str, parts: Sequence[Part], more: Mapping[str, Any], *, between: str = "") -> Message:
        """`between`: texts that follow each other."""
        texts = [each for each in parts if isinstance(each, str)]
        text = between.join(texts)
        if len(texts) == len(parts):
            return cls(role, text, more)
        joined: list[Part] = []
        for is_image, run in groupby(parts, lambda each: isinstance(each, bytes)):
            some = list(run)
            joined += some if is_image else [between.join(each for each in some if isinstance(each, str))]
        return cls(role, text, more, tuple(joined))

    @property
    def images(self) -> list[bytes]:
        return [each for each in self.parts if isinstance(each, bytes)]

    def for_template(self) -> dict[str, Any]:
        """With images, the content is a list, as templates of models that take them expect."""
        content: Any = self.content
        if self.parts:
            content = [
                {"type": "image"} if isinstance(each, bytes) else {"type": "text", "text": each} for each in self.parts
            ]
        return {"role": self.role, "content": content, **self.more}


@dataclass(frozen=True, slots=True)
class Tool:
    """`schema`: JSON Schema of the arguments. `where`: the client's field of it. `is_strict`: arguments must satisfy
    it. `is_custom`: the client gets the text of its only argument. `grammar`: of that text."""

    name: str
    schema: Schema
    description: str | None = None
    is_strict: bool = False
    where: str = "tools"
    is_custom: bool = False
    grammar: TextGrammar | None = None

    @classmethod
    def parse(cls, name: str, schema: object, description: str | None, *, is_strict: bool, where: str) -> Tool:
        """`schema` None: no arguments. Raises InputError."""
        schema = {"type": "object", "properties": {}} if schema is None else schema
        any_schema(schema, where)
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise InputError(f"{where}: expected the JSON Schema of an object (`type: object`)", field=where)
        return cls(name, schema, description, is_strict, where)

    @classmethod
    def custom(cls, name: str, description: str | None, syntax: str | None, definition: str, where: str) -> Tool:
        """`syntax`: of the input's grammar, lark or regex; None: it is any text. Raises InputError."""
        if syntax is None:
            return cls(name, input_schema({"type": "string"}), description, True, where, is_custom=True)
        kind = "Lark grammar" if syntax == "lark" else "regular expression"
        schema = input_schema({"type": "string", "description": f"Text of this {kind}:\n{definition}"})
        grammar = TextGrammar.parse(syntax, definition, where)
        return cls(name, schema, description, True, where, is_custom=True, grammar=grammar)

    def for_template(self) -> dict[str, Any]:
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.schema)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Args:
    mode: None: the model reads about the tools, and may call none.
    only: names of those that may be called; None: all.
    """

    tools: tuple[Tool, ...]
    mode: Mode | None = Mode.AUTO
    only: frozenset[str] | None = None
    is_parallel: bool = True

    @classmethod
    def parse(cls, tools: Sequence[Tool], mode: Mode | None, only: Sequence[str] | None, is_parallel: bool) -> ToolUse:
        """Raises InputError."""
        names = [tool.name for tool in tools]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise InputError(f"tools: expected names that differ, got {twice!r} twice", field="tools")
        if unknown := [name for name in only or () if name not in names]:
            raise InputError(
                f"tool_choice: expected one of {', '.join(names)}, got {unknown[0][:80]!r}", field="tool_choice"
            )
        return cls(tuple(tools), mode, None if only is None else frozenset(only), is_parallel)

    @property
    def callable(self) -> tuple[Tool, ...]:
        if self.mode is None:
            return ()
        return tuple(tool for tool in self.tools if self.only is None or tool.name in self.only)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar is needed to keep what the client asked for."""
        return self.mode is Mode.REQUIRED or any(
            tool.is_strict or not self.is_parallel or self.only is not None for tool in self.callable
        )


MESSAGE_CHARS = 32  # that a template puts around a message
IMAGE_BYTES_PER_CHAR = 64  # to hash as many takes as long as to tokenize a character


@dataclass(frozen=True, slots=True)
class Chat:
    """`settings`: of the model's template, such as `enable_thinking`. `effort`: of the reasoning, in OpenAI's words.
    `wishes`: settings for a template that reads them. `settings_field`, `effort_field`: the client's."""

    messages: tuple[Message, ...]
    tools: ToolUse | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    wishes: Mapping[str, Any] = field(default_factory=dict)
    settings_field: str = "chat_template_kwargs"
    effort_field: str = "reasoning_effort"
    images: tuple[bytes, ...] = field(init=False, compare=False)  # their files, in order
    chars: int = field(init=False, compare=False)  # what it costs to render and tokenize

    def __post_init__(self) -> None:
        more = sum(len(repr(each.more)) for each in self.messages if each.more)
        tools = sum(len(repr(tool.schema)) + len(tool.description or "") for tool in self.offered)
        settings = sum(len(repr(each)) for each in (self.settings, self.wishes) if each)
        content = sum(MESSAGE_CHARS + len(each.content) for each in self.messages)
        images = tuple(image for message in self.messages if message.parts for image in message.images)
        object.__setattr__(self, "images", images)
        content += sum(len(each) // IMAGE_BYTES_PER_CHAR for each in images)
        chars = content + more + tools + settings
        object.__setattr__(self, "chars", chars)

    @property
    def offered(self) -> tuple[Tool, ...]:
        return () if self.tools is None else self.tools.tools


def tool_call(call_id: str, name: str, arguments: str, where: str) -> dict[str, Any]:
    """A call of an earlier answer for the template, which writes the arguments in the model's own format. `where`: the
    client's field of the arguments. Raises InputError."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: expected the text of a JSON object: {error}", field=where) from None
    if not isinstance(parsed, dict):
        raise InputError(f"{where}: expected the text of a JSON object, got other JSON", field=where)
    return parsed_call(call_id, name, parsed)


def custom_call(call_id: str, name: str, text: str) -> dict[str, Any]:
    """As `tool_call`, of a custom tool."""
    return parsed_call(call_id, name, {INPUT: text})


def parsed_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str | None, calls: Collection[str], text: str, where: str) -> Message:
    """A message of role `tool`. `calls`: ids of the calls before it. Raises InputError."""
    if call_id not in calls:
        raise InputError(
            f"{where}: expected the id of a call in an earlier message, got {(call_id or '')[:80]!r}", field=where
        )
    return Message("tool", text, {"tool_call_id": call_id})


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools; both as templates read them. Tools are described to the model in a
    system message, and calls and their results become text, as Hermes writes them. Results and a text next to them
    become one message, because many templates demand that user and assistant alternate."""
    plain: list[dict[str, Any]] = []
    was_result = False
    for each in messages:
        shown, is_result = _as_text(each), each["role"] == "tool"
        if plain and plain[-1]["role"] == shown["role"] == "user" and (was_result or is_result):
            plain[-1]["content"] = _with(plain[-1]["content"], shown["content"])
        else:
            plain.append(shown)
        was_result = is_result
    if not tools:
        return plain
    text = _DESCRIPTION.format(tools="\n".join(map(_json, tools)))
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def in_parts(content: Any) -> list[dict[str, Any]]:
    """A message's content, as templates read it that know parts alone."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with(content: Any, more: Any) -> Any:
    """Both are texts, or lists of parts if they have images."""
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n{more}"
    return [*in_parts(content), *in_parts("\n"), *in_parts(more)]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):  # a user's, with images
        return dict(message)
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [{"name": each["name"], "arguments": each["arguments"]} for each in functions]
    texts = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *texts]))}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
