"""Tools, their choice and their calls, as chat completions send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from router.edge.openai.strict_model import Items, StrictModel, at_most
from router.model_formats.grammar import Mode
from router.texts.chat import MAX_TOOLS, TOOL_NAME, Tool, ToolUse, tool_call
from tandem.errors import InputError

Name = Annotated[str, Field(pattern=TOOL_NAME)]
_MODES = {"none": None, "auto": Mode.AUTO, "required": Mode.REQUIRED}


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


class FunctionName(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tool_choice")]


class AllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
Tools = Annotated[Items[FunctionTool], Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS, "tools")]


class CalledFunction(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    """Of an earlier answer that the client sends again. `index`: of clients that collected it from a stream."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Raises InputError."""
        return tool_call(self.id, self.function.name, self.function.arguments, f"{where}.function.arguments")


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, is_parallel: bool | None) -> ToolUse | None:
    """None without tools. A tool by its name is called exactly once, as in the OpenAI API. Raises InputError."""
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise InputError("tool_choice: expected tools beside it, got none", field="tool_choice")
        return None
    mode, only = _chosen(choice)
    return ToolUse.parse(tools, mode, only, is_parallel is not False and not isinstance(choice, NamedTool))


def _chosen(choice: ToolChoice | None) -> tuple[Mode | None, list[str] | None]:
    if isinstance(choice, NamedTool):
        return Mode.REQUIRED, [choice.function.name]
    if isinstance(choice, AllowedToolsChoice):
        return _MODES[choice.allowed_tools.mode], [each.function.name for each in choice.allowed_tools.tools]
    return _MODES[choice or "auto"], None
