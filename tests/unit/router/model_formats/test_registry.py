"""Which formats a model's chat template asks for."""

from __future__ import annotations

import pytest

from router.model_formats.reasoning import REASONINGS
from router.model_formats.registry import TOOL_FORMATS, choose, formats_of, reasoning_format, tool_format
from tandem.errors import ConfigError
from tandem.text.chat_template import ChatTemplate

# The words of published templates by which their format is known.
TEMPLATES = [
    ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>', "hermes", None),
    ("<tool_call>\\n{...}</tool_call> {{ content.split('</think>') }} <think>\\n", "hermes", "deepseek_r1"),
    ("<tool_call>\\n<function=example>\\n<parameter=a>\\n</parameter>", "qwen3_coder", None),
    ("<tool_call>{function-name}\\n<arg_key>{k}</arg_key>\\n<arg_value> </think>", "glm", "deepseek_r1"),
    ('<minimax:tool_call>\\n<invoke name="tool"> <think>', "minimax_m2", "deepseek_r1"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>```json </think>", "deepseek_v3", "deepseek_r1"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜> </think>", "deepseek_v31", "deepseek_r1"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    ("<think></think><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
    ("<|start|>assistant<|channel|>analysis<|message|> <think>", "harmony", None),
    ("<|tool_call>call:{{ name }} <|channel>thought", "gemma4", "gemma4"),
    ("<start_function_call>call:", "function_gemma", None),
    ("[TOOL_CALLS] [", "mistral", None),
    ("[TOOL_CALLS]{{ name }}[ARGS] [THINK]", "mistral_args", "mistral"),
    ("prefix function calls with functools marker", "phi4", None),
    ("<|tool|>{{ tools }}<|/tool|>", "phi4", None),
    ("<|tool_call|> Here is my thought process:", "granite", "granite"),
    ("<|start_header_id|>ipython<|end_header_id|> <|python_tag|>", "llama3_json", None),
    ("<|start_header_id|> [func_name1(params_name1=params_value1)] ipython", "pythonic", None),
    ("<start_of_turn> [func_name1(params_name1=params_value1)]", "pythonic", None),
    ("<|header_start|>ipython<|header_end|> {\"name\": function name", "llama4_json", None),
    ("<|header_start|> [func_name1(param1=value1)] ipython", "llama4_pythonic", None),
    ("<|im_start|>{{ role }}", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("source", "tools", "reasoning"), TEMPLATES)
def test_a_template_tells_its_formats(source: str, tools: str | None, reasoning: str | None) -> None:
    found = choose(source)
    assert (found.tools.name if found.tools else None) == tools
    assert (found.reasoning.name if found.reasoning else None) == reasoning


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m['tools'] %}<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}{% endfor %}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>```json {{ messages }}",
    ],
    ids=["of a message", "of the past"],
)
def test_tools_are_described_to_a_template_that_shows_no_tools_though_it_has_marks_of_calls(source: str) -> None:
    found = formats_of(ChatTemplate(source), "Phi3ForCausalLM")
    assert (found.tools, found.is_described) == (TOOL_FORMATS["hermes"], True)
    named = formats_of(ChatTemplate(source), "Phi3ForCausalLM", tool_parser="phi4")
    assert (named.tools, named.is_described) == (TOOL_FORMATS["phi4"], False)


def test_every_format_is_chosen_by_some_template() -> None:
    assert {tools for _, tools, _ in TEMPLATES} - {None} == set(TOOL_FORMATS)
    assert {reasoning for _, _, reasoning in TEMPLATES} - {None} == set(REASONINGS)


def test_without_a_template_the_architecture_tells() -> None:
    assert choose(None, ["GptOssForCausalLM"]).tools is TOOL_FORMATS["harmony"]
    assert choose(None, ["LlamaForCausalLM"]).tools is None


def test_formats_have_the_names_they_are_known_by() -> None:
    assert tool_format("hermes") is TOOL_FORMATS["hermes"]
    assert reasoning_format("mistral") is REASONINGS["mistral"]
    with pytest.raises(ConfigError, match=r"tool_parser: expected one of deepseek_v3, .*qwen3_coder, got 'hermess'"):
        tool_format("hermess")
    with pytest.raises(ConfigError, match=r"reasoning_parser: expected one of deepseek_r1, "):
        reasoning_format("think")


@pytest.mark.parametrize(
    ("prompt", "is_opened"),
    [("<|im_start|>assistant\n<think>\n", True), ("assistant\n<think>", True), ("<think>\n\n</think>\n\n", False)],
)
def test_a_prompt_may_open_reasoning(prompt: str, is_opened: bool) -> None:
    assert REASONINGS["deepseek_r1"].is_opened_by(prompt) == is_opened
