"""Answers as models of each format write them, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from router.model_formats.events import CallArguments, CallEnded, CallStarted, Event, Reasoning, Text
from router.model_formats.parser import AnswerParser
from router.model_formats.reasoning import REASONINGS
from router.model_formats.registry import TOOL_FORMATS, Formats
from router.testing.call_writers import WRITERS, Arguments

TOOLS: Mapping[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "at": {"type": "object", "properties": {"lat": {"type": "number"}, "exact": {"type": "boolean"}}},
        },
        "required": ["city"],
    },
    "write-file": {"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]},
    "now": {"type": "object", "properties": {}},
}
PARIS: Arguments = {"city": "Paris", "days": 2}
NOW: tuple[str, Arguments] = ("now", {})


@dataclass(frozen=True)
class Call:
    """`arguments`: parsed if the call ended, else the text that was given out."""

    name: str
    arguments: object
    id: str | None = None
    is_ended: bool = True


Part = Text | Reasoning | Call


@dataclass(frozen=True)
class Answer:
    format: str
    what: str
    text: str
    parts: Sequence[Part]
    reasoning: str | None = None
    is_reasoning_opened: bool = False

    @property
    def formats(self) -> Formats:
        return Formats(TOOL_FORMATS[self.format], REASONINGS[self.reasoning] if self.reasoning else None)

    def __str__(self) -> str:
        return f"{self.format}: {self.what}"


def parse(formats: Formats, pieces: Iterable[str], *, is_reasoning_opened: bool = False) -> list[Event]:
    parser = AnswerParser(formats, TOOLS, is_reasoning_opened=is_reasoning_opened)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def merged(events: Iterable[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        match (joined[-1] if joined else None), event:
            case (Text(before), Text(text)):
                joined[-1] = Text(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined


def parts(events: Iterable[Event]) -> list[Part]:
    """Of merged events. Checks their order: calls are numbered, and each ends before the next one starts."""
    found: list[Part] = []
    calls = 0
    for event in events:
        last = found[-1] if found else None
        match event:
            case Text() | Reasoning():
                found.append(event)
            case CallStarted(index, name, call_id):
                assert index == calls
                calls += 1
                found.append(Call(name, "", call_id, is_ended=False))
            case CallArguments(index, text):
                assert isinstance(last, Call)
                assert (index, last.is_ended) == (calls - 1, False)
                found[-1] = Call(last.name, text, last.id, is_ended=False)
            case CallEnded(index):
                assert isinstance(last, Call)
                assert index == calls - 1
                assert isinstance(last.arguments, str)
                found[-1] = Call(last.name, json.loads(last.arguments), last.id)
    return found


def chunked(text: str, random: Random) -> Iterator[str]:
    position = 0
    most = random.choice((1, 3, 8, 40))
    while position < len(text):
        size = random.randint(1, most)
        yield text[position : position + size]
        position += size


BARE = frozenset(["llama3_json", "pythonic"])  # calls without a marker, at the beginning only
# Texts inside an argument that end something in the format, if they stand elsewhere.
INNER_MARKS: Mapping[str, str] = {
    "deepseek_v3": "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "function_gemma": "}<end_function_call>",
    "gemma4": "}<tool_call|><|tool_call>call:now{}",
    "glm": "</tool_call></arg_value>, <tool_call>now</arg_value>",
    "granite": '"}}]',
    "harmony": "<|call|><|start|>assistant<|channel|>final<|message|>",
    "hermes": '"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}',
    "kimi_k2": "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": '"}}; {',
    "llama4_json": '"}}<|python_end|>',
    "llama4_pythonic": "')]<|python_end|>",
    "minimax_m2": "</invoke></parameter> and </parameter>.",
    "mistral": '"}}] [TOOL_CALLS]',
    "mistral_args": "}[TOOL_CALLS]now[ARGS]{}",
    "phi4": '"}}] functools[',
    "pythonic": "')]",
    "qwen3_coder": "</function>\n</tool_call></parameter>, or </parameter>\n\n</div>",
}
HARD = 'Zürich «北京» 🦜 \\d "quoted" it\'s\n\ttab / C:\\temp\\new'
NESTED: Arguments = {"city": "Rome", "days": -3, "tags": ["a", "b c", ""], "at": {"lat": 41.9, "exact": True}}


def _call(name: str, arguments: Arguments, format: str, number: int = 0) -> Call:
    return Call(name, arguments, f"functions.{name}:{number}" if format == "kimi_k2" else None)


def answers() -> Iterator[Answer]:
    for format, write in WRITERS.items():
        one = write([("get_weather", PARIS)])
        paris = _call("get_weather", PARIS, format)
        yield Answer(format, "one call", one, [paris])
        three = [("get_weather", NESTED), NOW, ("write-file", {"content": "x"})]
        found = [_call(*call, format, number) for number, call in enumerate(three)]
        yield Answer(format, "parallel calls", write(three), found)
        for what, content in (("inner marks", INNER_MARKS[format]), ("hard text", HARD), ("no text", "")):
            values = {"content": content}
            yield Answer(format, what, write([("write-file", values)]), [_call("write-file", values, format)])
        unknown = write([("launch", {"at": "dawn"})])
        if format == "harmony":
            yield from _harmony_answers(one, paris, unknown)
            continue
        yield Answer(format, "an unknown tool", f"I will. {unknown} Done.", [Text(f"I will. {unknown} Done.")])
        yield Answer(format, "text after", f"{one}\n It rains.\n", [paris, Text("\n It rains.\n")])
        yield Answer(format, "white space around", f"\n\n{one}\n\n", [paris])
        if format in BARE:
            yield Answer(format, "text before", f"So: {one}", [Text(f"So: {one}")])
            continue
        text = "Let me look.\n\n"
        yield Answer(format, "text before", text + one, [Text(text), paris])
        yield Answer(format, "a known tool after an unknown one", unknown + one, [Text(unknown), paris])
        trigger = TOOL_FORMATS[format].triggers[0]
        yield Answer(format, "only markers", f"{trigger}{trigger} is it", [Text(f"{trigger}{trigger} is it")])
    yield from _reasoning_answers()
    yield from _variants()


def _harmony_answers(one: str, paris: Call, unknown: str) -> Iterator[Answer]:
    thought = "<|channel|>analysis<|message|>Hm. <|not a mark|><|end|><|start|>assistant"
    final = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    hm = Reasoning("Hm. <|not a mark|>")
    yield Answer("harmony", "reasoning before", thought + one, [hm, paris])
    yield Answer("harmony", "text after", thought + one + final, [hm, paris, Text("It rains.")])
    preamble = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
    yield Answer("harmony", "text before", preamble + one, [Text("Let me look."), paris])
    yield Answer("harmony", "an unknown tool", thought + unknown, [hm, Text("<|start|>assistant" + unknown)])
    yield Answer("harmony", "the end token is not in the text", one.removesuffix("<|call|>"), [paris])
    yield Answer("harmony", "no channels", "It <|says|> rain.", [Text("It <|says|> rain.")])
    early = "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>" + json.dumps(PARIS)
    yield Answer("harmony", "the recipient before the channel", early, [paris])
    tool = "<|channel|>commentary to=browser.search<|message|>{}<|call|>"
    yield Answer("harmony", "another recipient", tool, [Text(tool)])
    cut = "<|channel|>analysis<|message|>Hm. It"
    yield Answer("harmony", "cut off in reasoning", cut, [Reasoning("Hm. It")])


def _reasoning_answers() -> Iterator[Answer]:
    for reasoning, format, begin, end in (
        ("deepseek_r1", "hermes", "<think>", "</think>"),
        ("deepseek_r1", "glm", "<think>", "</think>"),
        ("deepseek_r1", "deepseek_v31", "<think>", "</think>"),
        ("deepseek_r1", "llama3_json", "<think>", "</think>"),
        ("kimi_k2", "kimi_k2", "<think>", "</think>"),
        ("mistral", "mistral_args", "[THINK]", "[/THINK]"),
        ("gemma4", "gemma4", "<|channel>thought", "<channel|>"),
        ("granite", "granite", "Here is my thought process:", "Here is my response:"),
    ):
        one = WRITERS[format]([("get_weather", PARIS)])
        paris = _call("get_weather", PARIS, format)
        call = WRITERS[format]([NOW]) if format != "kimi_k2" else "a call"
        thought = Reasoning(f"Is it\n{call}?")
        written = f"\n{thought.text}\n{end}\n\n"
        whole = Answer(format, "reasoning before a call", f"{begin}{written}{one}", [thought, paris], reasoning)
        yield whole
        yield Answer(format, "reasoning opened in the prompt", f"{written}{one}", [thought, paris], reasoning, True)
        yield Answer(format, "reasoning opened twice", whole.text, whole.parts, reasoning, True)
        yield Answer(format, "no reasoning", f"No {end}.", [Text(f"No {end}.")], reasoning)
        yield Answer(format, "reasoning cut off", f"{begin}Hm. {end[:-1]}", [Reasoning(f"Hm. {end[:-1]}")], reasoning)
    one = WRITERS["kimi_k2"]([("get_weather", PARIS)])
    found: list[Part] = [Reasoning("Look. "), _call("get_weather", PARIS, "kimi_k2")]
    yield Answer("kimi_k2", "reasoning without its end", f"<think>Look. {one}", found, "kimi_k2")


def _variants() -> Iterator[Answer]:
    """What models write besides the canonical form, and what only looks like a call."""
    paris = Call("get_weather", PARIS)
    text = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
    variants: Sequence[tuple[str, str, str, Sequence[Part]]] = (
        ("hermes", "one line, no end", f"<tool_call>{text}", [paris]),
        ("hermes", "arguments before the name",
         '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>', [paris]),
        ("hermes", "no arguments", '<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
        ("hermes", "an id before", '<tool_call>{"id": "c1", "name": "now", "arguments": {}}', [Call("now", {}, "c1")]),
        ("hermes", "keys after", '<tool_call>{"name": "now", "arguments": {}, "id": "c1", "type": "function"}',
         [Call("now", {})]),
        ("hermes", "an escaped name", '<tool_call>{"name": "n\\u006fw", "arguments": {}}', [Call("now", {})]),
        ("hermes", "raw line break in a string", '<tool_call>{"name": "write-file", "arguments": {"content": "a\nb"}}',
         [Call("write-file", {"content": "a\nb"})]),
        ("hermes", "another key", '<tool_call>{"name": "now", "args": {"a": 1}}</tool_call>',
         [Text('<tool_call>{"name": "now", "args": {"a": 1}}</tool_call>')]),
        ("hermes", "another key after", '<tool_call>{"name": "now", "arguments": {}, "why": 1}</tool_call>',
         [Call("now", {}), Text(', "why": 1}</tool_call>')]),
        ("hermes", "no JSON", "<tool_call>{name: now}</tool_call>", [Text("<tool_call>{name: now}</tool_call>")]),
        ("hermes", "arguments are no object", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
         [Text('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>')]),
        ("hermes", "broken arguments", '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
         [Call("now", '{"a": ', is_ended=False), Text("01}}</tool_call>")]),
        ("hermes", "a broken call and a good one",
         f'<tool_call>{{"name": "now", "arguments": {{"a" 1}}}}</tool_call> <tool_call>{text}',
         [Call("now", '{"a" ', is_ended=False), Text("1}}</tool_call> "), paris]),
        ("hermes", "cut off in the name", 'Well <tool_call>{"name": "get_w', [Text('Well <tool_call>{"name": "get_w')]),
        ("hermes", "cut off in arguments", '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa',
         [Call("get_weather", '{"city": "Pa', is_ended=False)]),
        ("hermes", "a lone marker's beginning", "a < b <tool_ca", [Text("a < b <tool_ca")]),
        ("qwen3_coder", "no outer tags", "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
         [Call("get_weather", {"city": "Paris"})]),
        ("qwen3_coder", "the function's end is missing",
         "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
         [Call("get_weather", {"city": "Paris"})]),
        ("qwen3_coder", "values of other types than the schema's",
         "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n<parameter=at>\n{'lat': 1}\n"
         "</parameter>\n<parameter=other>\n1\n</parameter>\n</function>\n</tool_call>",
         [Call("get_weather", {"days": "many", "at": "{'lat': 1}", "other": "1"})]),
        ("qwen3_coder", "cut off in a value", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
         [Call("get_weather", '{"city": "Par', is_ended=False)]),
        ("qwen3_coder", "cut off in a typed value", "<tool_call>\n<function=get_weather>\n<parameter=days>\n1",
         [Call("get_weather", '{"days": ', is_ended=False), Text("1")]),
        ("qwen3_coder", "text between values",
         "<tool_call>\n<function=get_weather>\n<parameter=city>\nP\n</parameter>\n</function>? No.",
         [Call("get_weather", {"city": "P"}), Text("? No.")]),
        ("glm", "one line", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
         "<tool_call>now</tool_call>", [Call("get_weather", {"city": "Paris"}), Call("now", {})]),
        ("glm", "no value", "<tool_call>get_weather<arg_key>city</arg_key></tool_call>",
         [Text("<tool_call>get_weather<arg_key>city</arg_key></tool_call>")]),
        ("llama3_json", "the marker", "Look: <|python_tag|>" + text.replace("arguments", "parameters"),
         [Text("Look: "), paris]),
        ("llama3_json", "a type before", '{"type": "function", "name": "now", "parameters": {}}', [Call("now", {})]),
        ("llama3_json", "JSON that is no call", '{"name": "Ada", "parameters": {}}',
         [Text('{"name": "Ada", "parameters": {}}')]),
        ("pythonic", "JSON's words", '[get_weather(city="a\\"b", at={"exact": true, "lat": null})]',
         [Call("get_weather", {"city": 'a"b', "at": {"exact": True, "lat": None}})]),
        ("pythonic", "a link", "[get_weather(city)](https://x.y)", [Text("[get_weather(city)](https://x.y)")]),
        ("pythonic", "Python's escapes", r"""[get_weather(city='\x41\'\u00e9\U0001f99c\d\
')]""", [Call("get_weather", {"city": "A'é🦜\\d"})]),
        ("llama4_pythonic", "without marks", '[get_weather(city="Paris", days=2)]', [paris]),
        ("llama4_json", "Python", '<|python_start|>[get_weather(city="Paris", days=2)]<|python_end|>', [paris]),
        ("mistral", "with ids", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}]', [Call("now", {})]),
        ("mistral", "the newer form", '[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}', [Call("now", {}, "a1")]),
        ("mistral_args", "without [ARGS]", "Hm.[TOOL_CALLS]now{}", [Text("Hm."), Call("now", {})]),
        ("mistral_args", "no object", "[TOOL_CALLS]now[ARGS]5", [Text("[TOOL_CALLS]now[ARGS]5")]),
        ("deepseek_v3", "without the outer marks",
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>", [Call("now", {})]),
        ("kimi_k2", "a bare name",
         "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
         [Call("now", {})]),
        ("granite", "other marks", f"<tool_call>[{text}]", [paris]),
        ("granite", "20B", f"<function_call> {text}", [paris]),
        ("phi4", "tokens", f"<|tool_call|>[{text}]<|/tool_call|>", [paris]),
        ("phi4", "Python's module", "import functools\nfunctools.reduce", [Text("import functools\nfunctools.reduce")]),
        ("gemma4", "cut off", '<|tool_call>call:get_weather{city:<|"|>Pa<|',
         [Call("get_weather", '{"city":"Pa<|', is_ended=False)]),
        ("minimax_m2", "values on their own lines",
         '<minimax:tool_call>\n<invoke name="write-file">\n<parameter name="content">\na\n\n</parameter>\n</invoke>\n'
         "</minimax:tool_call>", [Call("write-file", {"content": "a\n"})]),
    )  # fmt: skip
    for format, what, written, found in variants:
        yield Answer(format, what, written, found)


ANSWERS = list(answers())
