"""The formats by name, and which one a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.model_formats.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.model_formats.formats.gemma import FUNCTION_GEMMA, GEMMA4
from router.model_formats.formats.glm import GLM
from router.model_formats.formats.granite import GRANITE
from router.model_formats.formats.harmony import HARMONY
from router.model_formats.formats.hermes import HERMES
from router.model_formats.formats.kimi import KIMI_K2
from router.model_formats.formats.llama import LLAMA3_JSON, LLAMA4_JSON, LLAMA4_PYTHONIC, PYTHONIC
from router.model_formats.formats.minimax import MINIMAX_M2
from router.model_formats.formats.mistral import MISTRAL, MISTRAL_ARGS
from router.model_formats.formats.phi4 import PHI4
from router.model_formats.formats.qwen3_coder import QWEN3_CODER
from router.model_formats.reasoning import REASONINGS, ReasoningFormat
from router.model_formats.shapes.tool_format import ToolFormat
from tandem.errors import ConfigError
from tandem.text.chat_template import ChatTemplate

T = TypeVar("T")
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        FUNCTION_GEMMA,
        GEMMA4,
        GLM,
        GRANITE,
        HARMONY,
        HERMES,
        KIMI_K2,
        LLAMA3_JSON,
        LLAMA4_JSON,
        LLAMA4_PYTHONIC,
        MINIMAX_M2,
        MISTRAL,
        MISTRAL_ARGS,
        PHI4,
        PYTHONIC,
        QWEN3_CODER,
    )
}
_PYTHONIC_PROMPT = "func_name1("  # Meta's words for the format, which templates of Llama and Gemma repeat
# The first row of which the template contains all texts.
_TEMPLATES: Sequence[tuple[tuple[str, ...], ToolFormat]] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI_K2),
    (("<minimax:tool_call>",), MINIMAX_M2),
    (("<arg_key>",), GLM),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<|tool_call>",), GEMMA4),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("functools",), PHI4),
    (("<|/tool_call|>",), PHI4),
    (("<|/tool|>",), PHI4),
    (("<|tool_call|>",), GRANITE),
    (("<function_call>",), GRANITE),
    (("<tool_call>",), HERMES),
    (("<|header_start|>", _PYTHONIC_PROMPT), LLAMA4_PYTHONIC),
    (("<|header_start|>", "ipython"), LLAMA4_JSON),
    ((_PYTHONIC_PROMPT,), PYTHONIC),
    (("<|start_header_id|>", "ipython"), LLAMA3_JSON),
)
_REASONING_TEMPLATES: Sequence[tuple[tuple[str, ...], str]] = (
    (("[THINK]",), "mistral"),
    (("<|channel>",), "gemma4"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("</think>",), "deepseek_r1"),
    (("<think>",), "deepseek_r1"),
)
# Of models whose template may not come with the checkpoint.
_ARCHITECTURES: Mapping[str, ToolFormat] = {"GptOssForCausalLM": HARMONY}


AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class Formats:
    """None: the model's answers have no such part that is known. `is_described`: the template knows no tools, so they
    are described to the model in a system message, in the format that it is asked to answer in."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_described: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """Of the tools' format and the reasoning's, for status."""
        tools = NONE if self.tools is None else self.tools.name
        reasoning = tools if self.tools is HARMONY else NONE if self.reasoning is None else self.reasoning.name
        return f"{tools} (described)" if self.is_described else tools, reasoning


def formats_of(
    template: ChatTemplate | None, architecture: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> Formats:
    """The formats of a model with these settings. Raises ConfigError for an unknown name."""
    chosen = choose(None if template is None else template.source, (architecture,))
    tools, reasoning = chosen.tools, chosen.reasoning
    if tool_parser != AUTO:
        tools = None if tool_parser == NONE else tool_format(tool_parser)
    if reasoning_parser != AUTO:
        reasoning = None if reasoning_parser == NONE else reasoning_format(reasoning_parser)
    knows_none = template is not None and "tools" not in template.variables
    if knows_none and tool_parser == AUTO:  # also if it has the marks of another format, as for calls of the past
        tools = HERMES
    return Formats(tools, reasoning, is_described=knows_none and tools is HERMES)


def choose(template_source: str | None, architectures: Sequence[str] = ()) -> Formats:
    """By what the model's chat template contains; without one, by the architectures of its config."""
    if template_source is None:
        return Formats(next((_ARCHITECTURES[each] for each in architectures if each in _ARCHITECTURES), None))
    tools = _first(_TEMPLATES, template_source)
    reasoning = None if tools is HARMONY else _first(_REASONING_TEMPLATES, template_source)
    return Formats(tools, REASONINGS[reasoning] if reasoning else None)


def tool_format(name: str) -> ToolFormat:
    """Raises ConfigError."""
    return _named(TOOL_FORMATS, name, "tool_parser")


def reasoning_format(name: str) -> ReasoningFormat:
    """Harmony's reasoning comes with its calls. Raises ConfigError."""
    return _named(REASONINGS, name, "reasoning_parser")


def _first(rows: Sequence[tuple[tuple[str, ...], T]], source: str) -> T | None:
    return next((found for texts, found in rows if all(text in source for text in texts)), None)


def _named(formats: Mapping[str, T], name: str, field: str) -> T:
    if name not in formats:
        raise ConfigError(f"{field}: expected one of {', '.join(sorted(formats))}, got {name!r}", field=field)
    return formats[name]
