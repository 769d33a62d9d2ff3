"""Calls as models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = dict[str, Any]
Calls = Sequence[tuple[str, Arguments]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return _json({"name": name, key: arguments})


def _bare(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _qwen3_coder(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        values = "".join(f"<parameter={key}>\n{_bare(each)}\n</parameter>\n" for key, each in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(each)}</arg_value>\n" for key, each in arguments.items()
        )
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax(calls: Calls) -> str:
    def one(name: str, arguments: Arguments) -> str:
        values = "".join(f'<parameter name="{key}">{_bare(each)}</parameter>\n' for key, each in arguments.items())
        return f'<invoke name="{name}">\n{values}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _llama3(calls: Calls) -> str:
    return "; ".join(_object(*call, key="parameters") for call in calls)


def _pythonic(calls: Calls) -> str:
    return (
        "["
        + ", ".join(f"{name}({', '.join(f'{key}={each!r}' for key, each in values.items())})" for name, values in calls)
        + "]"
    )


def _list(calls: Calls) -> str:
    return "[" + ", ".join(_object(*call) for call in calls) + "]"


def _deepseek_v3(calls: Calls) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(values)}\n```<｜tool▁call▁end｜>"
        for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(values)}<｜tool▁call▁end｜>" for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(values)}<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _gemma_value(value: object, mark: str) -> str:
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each, mark)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(each, mark) for each in value) + "]"
    return _json(value)


def _gemma4(calls: Calls) -> str:
    mark = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{_gemma_value(values, mark)}<tool_call|>" for name, values in calls)


def _function_gemma(calls: Calls) -> str:
    return "".join(
        f"<start_function_call>call:{name}{_gemma_value(values, '<escape>')}<end_function_call>"
        for name, values in calls
    )


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(values)}<|call|>"
        for name, values in calls
    )


WRITERS: Mapping[str, Callable[[Calls], str]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "function_gemma": _function_gemma,
    "gemma4": _gemma4,
    "glm": _glm,
    "granite": lambda calls: f"<|tool_call|>{_list(calls)}",
    "harmony": _harmony,
    "hermes": _hermes,
    "kimi_k2": _kimi,
    "llama3_json": _llama3,
    "llama4_json": lambda calls: f"<|python_start|>{_llama3(calls)}<|python_end|>",
    "llama4_pythonic": lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>",
    "minimax_m2": _minimax,
    "mistral": lambda calls: f"[TOOL_CALLS] {_list(calls)}",
    "mistral_args": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(values)}" for name, values in calls),
    "phi4": lambda calls: f"functools{_list(calls)}",
    "pythonic": _pythonic,
    "qwen3_coder": _qwen3_coder,
}
