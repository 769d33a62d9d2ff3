"""What a model makes of a chat: its prompt, the grammar that keeps what the client asked for, and how the answer is
read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.model_formats.custom_input import input_schema
from router.model_formats.formats.harmony import HARMONY
from router.model_formats.grammar import FreeArguments, GrammarText, Mode, Schema, Tools
from router.model_formats.parser import AnswerParser, grammar, kept_tokens
from router.model_formats.registry import Formats
from router.texts.chat import THINKING, Chat, ToolUse, described, in_parts
from router.texts.detokenizer import KeptTokens, TokenDecoder
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, joined, json_schema
from tandem.text.chat_template import ChatTemplate
from tandem.text.special_texts import SpecialTexts
from tandem.text.tokenizer import Tokenizer

_RESERVED = frozenset(["messages", "tools", "documents", "add_generation_prompt"])


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the text of an answer is read. `tools`: those that may be called. `custom`: the custom ones of them."""

    formats: Formats
    tools: Tools
    custom: frozenset[str]
    is_reasoning_opened: bool
    decoder: TokenDecoder

    def parser(self) -> AnswerParser:
        return AnswerParser(self.formats, self.tools, is_reasoning_opened=self.is_reasoning_opened)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`reading`: None if the answer is text alone."""

    text: str
    reading: AnswerReading | None
    constraint: Constraint | None


class ChatModel:
    """Args: `keeps_text`: special tokens that messages spell out are text; else they act as the template's do."""

    def __init__(
        self, name: str, template: ChatTemplate, tokenizer: Tokenizer, formats: Formats, *, keeps_text: bool
    ) -> None:
        self._formats = formats
        self._name = name
        self._template = template
        self._special = {token: number for number in tokenizer.special_ids if (token := tokenizer.token(number))}
        self._marks = SpecialTexts(self._special) if keeps_text else None
        self._decoder = KeptTokens(tokenizer, kept_tokens(formats, self._special))

    def rendered(self, chat: Chat, asked: Constraint | None) -> RenderedChat:
        """`asked`: for the answer's text. Raises InputError."""
        use = chat.tools
        wishes = {name: value for name, value in chat.wishes.items() if name in self._template.variables}
        settings = wishes | self._effort(chat) | self._settings(chat)
        if use is not None and use.callable and self._formats.tools is None:
            raise InputError(
                f"tools: the format of calls of model {self._name!r} is not known; leave tools out, or name a format "
                "in the model's setting `tool_parser`",
                field="tools",
            )
        messages, tools, settings = self._marked(
            ([each.for_template() for each in chat.messages], [tool.for_template() for tool in chat.offered], settings)
        )
        if self._formats.is_described:
            messages, tools = described(messages, tools), []
        if self._template.reads_parts:
            messages = [each | {"content": in_parts(each["content"])} for each in messages]
        text = self._template.render(messages, tools=tools or None, settings=settings)
        reasoning = self._formats.reasoning
        is_opened = reasoning is not None and reasoning.is_opened_by(text)
        callable_ = () if use is None else use.callable
        called = {tool.name: tool.schema for tool in callable_}
        custom = frozenset(tool.name for tool in callable_ if tool.is_custom)
        return RenderedChat(text, self._reading(called, custom, is_opened), self._constraint(use, asked, is_opened))

    def _marked(self, written: Any) -> Any:
        """All that the client wrote and the template will write, with the special tokens in it marked."""
        return written if self._marks is None else self._marks.mark(written)

    def _settings(self, chat: Chat) -> dict[str, Any]:
        """Raises InputError for a setting that the template does not read, unless it turns off what is not there."""
        known = self._template.variables - _RESERVED
        field = chat.settings_field
        for name, value in chat.settings.items():
            if name in _RESERVED:
                raise InputError(
                    f"{field}.{name}: expected other names; this one is the server's own", field=f"{field}.{name}"
                )
            if name not in known and not (name in THINKING and value is False):
                names = ", ".join(sorted(each for each in known if not each.endswith("_token"))) or "none"
                raise InputError(
                    f"{field}.{name[:80]}: the model's chat template does not read it; it reads {names}",
                    field=f"{field}.{name[:80]}",
                )
        return dict(chat.settings)

    def _effort(self, chat: Chat) -> dict[str, Any]:
        """The template's settings for a reasoning effort. Raises InputError if it has none."""
        variables, effort = self._template.variables, chat.effort
        if effort is None:
            return {}
        thinking = [name for name in THINKING if name in variables]
        if effort == "none":
            return {name: False for name in thinking}
        if "reasoning_effort" in variables:
            return {"reasoning_effort": effort}
        if thinking:
            return {name: True for name in thinking}
        if self._formats.reasoning is not None:  # it always reasons
            return {}
        raise InputError(
            f"{chat.effort_field}: model {self._name!r} does not reason; leave it out, or send 'none'",
            field=chat.effort_field,
        )

    def _reading(self, called: Tools, custom: frozenset[str], is_opened: bool) -> AnswerReading | None:
        tools = self._formats.tools if called or self._formats.tools is HARMONY else None
        if tools is None and self._formats.reasoning is None:
            return None
        return AnswerReading(Formats(tools, self._formats.reasoning), called, custom, is_opened, self._decoder)

    def _constraint(self, use: ToolUse | None, asked: Constraint | None, is_opened: bool) -> Constraint | None:
        """Raises InputError."""
        callable_ = () if use is None else use.callable
        if callable_ and asked is not None and asked.is_free:
            raise InputError(
                f"{asked.field}: expected no tools beside a structural tag, whose free text could be a call; leave one "
                "of them out, or send tool_choice 'none'",
                field=asked.field,
            )
        has_calls = use is not None and callable_ and (use.is_constrained or asked is not None)
        reasons = self._formats.reasoning is not None or self._formats.tools is HARMONY
        if not has_calls and (asked is None or not reasons):
            return asked
        schemas: dict[str, Schema] = {}
        parts: list[Constraint] = []
        named: dict[str, Constraint] = {}
        mode, is_parallel = Mode.AUTO, True
        if use is not None and has_calls:
            mode, is_parallel = use.mode or mode, use.is_parallel
            for tool in callable_:
                if (text := tool.grammar) is not None:
                    name = f"input{len(named)}"
                    schemas[tool.name] = input_schema(GrammarText(name, text.regex, tool.where))
                    named[name] = text.escaped
                    parts.append(text.plain)
                    continue
                must_fit = tool.is_strict or mode is Mode.REQUIRED
                schemas[tool.name] = tool.schema if must_fit else FreeArguments(tool.schema)
                parts.append(json_schema(schemas[tool.name], tool.where))
        start = grammar(
            self._formats,
            schemas,
            mode,
            is_parallel=is_parallel,
            is_reasoning_opened=is_opened,
            special=self._special,
            answer="" if asked is None else "@answer",
        )
        field = asked.field if asked is not None and not parts else "tools"
        if asked is not None and mode is not Mode.REQUIRED:
            named["answer"] = asked
            parts.append(asked)
        return joined(start, parts, field, named)
