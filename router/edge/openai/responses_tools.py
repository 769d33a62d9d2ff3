"""Tools and their choice, as the Responses API has them: the fields of chat completions, one level higher."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

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
    run_by_clients,
)
from router.edge.strict_model import Items, StrictModel, at_most
from router.texts.chat import MAX_TOOLS, Tool


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


ResponsesTools = Annotated[
    Items[
        Annotated[
            Annotated[ResponsesTool, Tag("Function")] | Annotated[ResponsesCustomTool, Tag("Custom")],
            Discriminator(branch),
            run_by_clients("function", "custom", offered_as="a function or a custom tool"),
        ]
    ],
    Field(max_length=MAX_TOOLS),
    at_most(MAX_TOOLS, "tools"),
]
ResponsesToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


def parsed_choice(choice: ResponsesToolChoice | None) -> ToolChoice | None:
    """As chat completions send it."""
    match choice:
        case FunctionChoice():
            return _named(choice)
        case AllowedChoice():
            allowed = AllowedTools(mode=choice.mode, tools=[_named(each) for each in choice.tools])
            return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
        case other:
            return other


def _named(choice: FunctionChoice) -> NamedTool | NamedCustomTool:
    if choice.type == "custom":
        return NamedCustomTool(type="custom", custom=ToolName(name=choice.name))
    return NamedTool(type="function", function=ToolName(name=choice.name))
