"""What is found in answers of every format, however their text was cut into pieces."""

from __future__ import annotations

import json
import os
from random import Random
from time import process_time

import pytest

from router.model_formats.events import CallArguments, CallStarted, Reasoning, Text
from router.model_formats.parser import AnswerParser
from router.model_formats.reader import MAX_HELD_CHARS
from router.model_formats.registry import TOOL_FORMATS, Formats
from router.model_formats.shapes.xml_calls import MAX_VALUE_CHARS
from router.testing.call_writers import WRITERS
from tests.unit.router.model_formats.answers import ANSWERS, TOOLS, Answer, chunked, merged, parse, parts

SOAK = bool(os.environ.get("TANDEM_SOAK"))
CHUNKINGS = 100_000 // len(ANSWERS) + 1 if SOAK else 50  # of each answer
FUZZED = 20_000 if SOAK else 100  # texts of each format


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_has_its_parts(answer: Answer) -> None:
    events = parse(answer.formats, [answer.text], is_reasoning_opened=answer.is_reasoning_opened)
    assert parts(events) == list(answer.parts)


@pytest.mark.soak
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_pieces_do_not_change_what_is_found(answer: Answer) -> None:
    whole = parse(answer.formats, [answer.text], is_reasoning_opened=answer.is_reasoning_opened)
    for seed in range(CHUNKINGS):
        pieces = chunked(answer.text, Random(seed))
        assert parse(answer.formats, pieces, is_reasoning_opened=answer.is_reasoning_opened) == whole, seed


@pytest.mark.soak
@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_cut_off_anywhere_loses_no_text(answer: Answer) -> None:
    whole = parse(answer.formats, [answer.text], is_reasoning_opened=answer.is_reasoning_opened)
    started = [each for each in whole if isinstance(each, CallStarted)]
    for size in range(0, len(answer.text), 1 if SOAK else 7):
        cut = answer.text[:size]
        events = parse(answer.formats, cut, is_reasoning_opened=answer.is_reasoning_opened)
        found = [each for each in events if isinstance(each, CallStarted)]
        assert found == started[: len(found)]
        if all(isinstance(each, Text) for each in events) and answer.reasoning is None:
            assert "".join(each.text for each in events if isinstance(each, Text)) == cut or answer.format == "harmony"


@pytest.mark.soak
@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_random_text_of_markers_comes_out_whole(format: str) -> None:
    """Numbered words stand between pieces of real answers: each comes out, in text, reasoning or a call."""
    texts = [each.text for each in ANSWERS if each.format == format]
    for seed in range(FUZZED):
        random = Random(seed)
        pieces = []
        for number in range(random.randint(1, 12)):
            source = random.choice(texts)
            start = random.randrange(len(source))
            pieces += [source[start : start + random.randint(1, 40)], f"w{seed}x{number}y"]
        text = "".join(pieces)
        formats = Formats(TOOL_FORMATS[format])
        events = parse(formats, [text])
        assert parse(formats, chunked(text, random)) == events, text
        parts(events)
        out = "".join(getattr(each, "text", "") + (getattr(each, "id", "") or "") for each in events)
        assert [each for each in pieces[1::2] if each not in out] == [], (text, events)


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_without_tools_all_is_text(format: str) -> None:
    if format == "harmony":
        pytest.skip("its channels are no part of the text")
    text = WRITERS[format]([("get_weather", {"city": "Paris"})])
    parser = AnswerParser(Formats(TOOL_FORMATS[format]), {})
    assert merged([*parser.feed(text), *parser.finish()]) == [Text(text)]


def test_without_formats_all_is_text() -> None:
    assert parse(Formats(), ["<think>a</think>", "<tool_call>"]) == [Text("<think>a</think><tool_call>")]


def test_arguments_come_while_they_are_written() -> None:
    parser = AnswerParser(Formats(TOOL_FORMATS["hermes"]), TOOLS)
    parser.feed('<tool_call>{"name": "get_weather", "arguments": ')
    assert parser.feed('{"ci') == [CallStarted(0, "get_weather"), CallArguments(0, '{"ci')]
    assert parser.feed('ty": "Pa') == [CallArguments(0, 'ty": "Pa')]


def test_text_is_held_only_while_it_may_be_a_marker() -> None:
    parser = AnswerParser(Formats(TOOL_FORMATS["hermes"]), TOOLS)
    assert parser.feed("a <tool_") == [Text("a ")]
    assert parser.feed("x") == [Text("<tool_x")]


def test_a_call_whose_arguments_stand_first_is_held_no_longer_than_allowed() -> None:
    parser = AnswerParser(Formats(TOOL_FORMATS["hermes"]), TOOLS)
    begin = '<tool_call>{"arguments": {"content": "'
    assert parser.feed(begin + "x" * (MAX_HELD_CHARS - len(begin) - 1)) == []
    assert parse(Formats(TOOL_FORMATS["hermes"]), [begin, "x" * MAX_HELD_CHARS]) == [Text(begin + "x" * MAX_HELD_CHARS)]
    given = parser.feed("x" * 100)
    assert sum(len(each.text) for each in given if isinstance(each, Text)) > MAX_HELD_CHARS


def test_a_long_value_of_another_type_becomes_a_string() -> None:
    value = "[" + "1, " * MAX_VALUE_CHARS + "1]"
    text = f"<tool_call>\n<function=get_weather>\n<parameter=tags>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], [text[start : start + 999] for start in range(0, len(text), 999)]):
        events = parse(Formats(TOOL_FORMATS["qwen3_coder"]), pieces)
        assert isinstance(events[1], CallArguments)
        assert json.loads(events[1].text) == {"tags": value}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "<tool_call>'),
        ("hermes", "<tool_call>   \n   "),
        ("hermes", '<tool_call>{"name": "write-file", "arguments": {"content": "\\\\\\"'),
        ("qwen3_coder", "<function=get_weather><parameter=city></parameter>\n"),
        ("qwen3_coder", "<tool_call><function="),
        ("pythonic", "[[[{"),
        ("harmony", "<|channel|><|start|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0"),
    ],
)
@pytest.mark.parametrize("piece", [5, pytest.param(10**9, marks=pytest.mark.slow)])
def test_time_is_linear_in_the_text(format: str, text: str, piece: int) -> None:
    def cost_s(size: int) -> float:
        whole = (text * (size // len(text) + 1))[:size]
        pieces = [whole[start : start + piece] for start in range(0, size, piece)]
        began = process_time()
        parse(Formats(TOOL_FORMATS[format]), pieces)
        return process_time() - began

    assert min(cost_s(60_000) for _ in range(3)) < 10 * min(cost_s(15_000) for _ in range(3))


def test_deep_nesting_ends_a_call_and_nothing_else() -> None:
    deep = '{"a": ' + "[" * 5000
    events = parse(Formats(TOOL_FORMATS["hermes"]), [f'<tool_call>{{"name": "now", "arguments": {deep}'])
    assert isinstance(events[0], CallStarted)
    assert "".join(each.text for each in events if isinstance(each, CallArguments | Text)) == deep


def test_harmonys_reasoning_needs_no_tools() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    parser = AnswerParser(Formats(TOOL_FORMATS["harmony"]), {})
    assert [*parser.feed(text), *parser.finish()] == [Reasoning("Hm."), Text("Yes.")]
