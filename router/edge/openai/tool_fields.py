"""Tools, their choice and their calls, as chat completions send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.edge.strict_model import Items, StrictModel, at_most, type_of, unsupported
from router.model_formats.grammar import Mode
from router.texts.chat import MAX_CALLS, MAX_TOOLS, TOOL_NAME, Tool, ToolUse, custom_call, tool_call
from tandem.errors import InputError

Name = Annotated[str, Field(pattern=TOOL_NAME)]
FORM_HELP = "What the input of every call satisfies. Absent: it is any text."
_MODES = {"none": None, "auto": Mode.AUTO, "required": Mode.REQUIRED}


def branch(given: object) -> str:
    """Which one of a union is validated, so that an error is about the one that the client meant."""
    return "Custom" if type_of(given) == "custom" else "Function"


def form_branch(given: object) -> str:
    """As `branch`, of a custom tool's format."""
    return "Grammar" if type_of(given) == "grammar" else "AnyText"


def run_by_clients(*types: str, offered_as: str) -> BeforeValidator:
    """Refuses tools of other types: those that run at a server have other fields."""

    def check(given: object) -> object:
        if isinstance(given, dict) and given.get("type") not in (*types, None):
            remedy = f"offer it as {offered_as}, which the client runs"
            raise unsupported("tools", f"type {str(given['type'])[:40]!r}", remedy)
        return given

    return BeforeValidator(check)


class FunctionFields(StrictModel):
    name: Name
    description: str | None = None
    parameters: Any = Field(None, description="JSON Schema of the arguments. Absent: an object without properties.")
    strict: bool | None = Field(None, description="The arguments of every call satisfy `parameters`.")

    def tool(self, where: str) -> Tool:
        """`where`: the client's field of this function. Raises InputError."""
        strict, field = bool(self.strict), f"{where}.parameters"
        return Tool.parse(self.name, self.parameters, self.description, is_strict=strict, where=field)


class FunctionTool(StrictModel):
    type: Literal["function"]
    function: FunctionFields

    def tool(self, where: str) -> Tool:
        """`where`: the client's field of this tool. Raises InputError."""
        return self.function.tool(f"{where}.function")


class GrammarFields(StrictModel):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class GrammarFormat(StrictModel):
    type: Literal["grammar"]
    grammar: GrammarFields


class AnyText(StrictModel):
    type: Literal["text"]


class CustomFields(StrictModel):
    name: Name
    description: str | None = None
    format: (
        Annotated[
            Annotated[GrammarFormat, Tag("Grammar")] | Annotated[AnyText, Tag("AnyText")],
            Discriminator(form_branch),
        ]
        | None
    ) = Field(None, description=FORM_HELP)

    def tool(self, where: str) -> Tool:
        """`where`: the client's field of this tool. Raises InputError."""
        if not isinstance(self.format, GrammarFormat):
            return Tool.custom(self.name, self.description, None, "", where)
        form = self.format.grammar
        field = f"{where}.format.grammar.definition"
        return Tool.custom(self.name, self.description, form.syntax, form.definition, field)


class CustomTool(StrictModel):
    type: Literal["custom"]
    custom: CustomFields

    def tool(self, where: str) -> Tool:
        """As `FunctionTool.tool`."""
        return self.custom.tool(f"{where}.custom")


class ToolName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: ToolName


class NamedCustomTool(StrictModel):
    type: Literal["custom"]
    custom: ToolName


AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("Function")] | Annotated[NamedCustomTool, Tag("Custom")], Discriminator(branch)
]


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AnyNamedTool], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tool_choice")]


class AllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedToolsChoice
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[CustomTool, Tag("Custom")], Discriminator(branch)
]
Tools = Annotated[Items[AnyTool], Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")]


class EarlierFunction(StrictModel):
    name: str
    arguments: str
    parsed_arguments: object = None  # what OpenAI's SDKs read from the arguments


class EarlierToolCall(StrictModel):
    """Of an earlier answer that the client sends again. `index`: of clients that collected it from a stream."""

    id: str
    type: Literal["function"] = "function"
    function: EarlierFunction
    index: int | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Raises InputError."""
        return tool_call(self.id, self.function.name, self.function.arguments, f"{where}.function.arguments")


class EarlierCustom(StrictModel):
    name: str
    input: str


class EarlierCustomToolCall(StrictModel):
    """As `EarlierToolCall`, of a custom tool."""

    id: str
    type: Literal["custom"]
    custom: EarlierCustom
    index: int | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        return custom_call(self.id, self.custom.name, self.custom.input)


AnyEarlierCall = Annotated[
    Annotated[EarlierToolCall, Tag("Function")] | Annotated[EarlierCustomToolCall, Tag("Custom")], Discriminator(branch)
]
EarlierCalls = Annotated[Items[AnyEarlierCall], Field(max_length=MAX_CALLS), at_most(MAX_CALLS, "tool_calls")]


def parsed_tools(tools: Sequence[FunctionTool | CustomTool] | None) -> list[Tool]:
    """Raises InputError."""
    return [tool.tool(f"tools.{number}") for number, tool in enumerate(tools or ())]


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool | None) -> ToolUse | None:
    """None without tools. A tool by its name is called exactly once, as in the OpenAI API. Raises InputError."""
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise InputError("tool_choice: expected tools beside it, got none", field="tool_choice")
        return None
    mode, named = _chosen(choice)
    customs = {tool.name: tool.is_custom for tool in tools}
    for each in named or ():
        if customs.get(_name(each)) is (each.type == "function"):
            other = "function" if each.type == "custom" else "custom"
            raise InputError(
                f"tool_choice: expected type {other!r} of tool {_name(each)!r}, got {each.type!r}", field="tool_choice"
            )
    is_named = isinstance(choice, NamedTool | NamedCustomTool)
    only = None if named is None else list(map(_name, named))
    return ToolUse.parse(tools, mode, only, is_parallel is not False and not is_named)


def _chosen(choice: ToolChoice | None) -> tuple[Mode | None, Sequence[NamedTool | NamedCustomTool] | None]:
    if isinstance(choice, NamedTool | NamedCustomTool):
        return Mode.REQUIRED, [choice]
    if isinstance(choice, AllowedToolsChoice):
        return _MODES[choice.allowed_tools.mode], choice.allowed_tools.tools
    return _MODES[choice or "auto"], None


def _name(tool: NamedTool | NamedCustomTool) -> str:
    return tool.function.name if isinstance(tool, NamedTool) else tool.custom.name
