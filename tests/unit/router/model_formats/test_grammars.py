"""Grammars of calls: what the parser reads is allowed, what is no valid call is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.model_formats.custom_input import InputDecoder, input_schema
from router.model_formats.events import CallArguments
from router.model_formats.grammar import FreeArguments, GrammarText, Mode, parameters
from router.model_formats.parser import AnswerParser, grammar
from router.model_formats.reasoning import REASONINGS
from router.model_formats.registry import TOOL_FORMATS, Formats
from router.testing.call_writers import WRITERS
from tandem.errors import InputError
from tandem.grammar.compiler import GrammarCompiler
from tandem.grammar.constraint import Constraint, TextGrammar, joined, lark, regex
from tandem.testing.models import write_tiny_llama
from tandem.testing.schema_suite import Grammars
from tandem.text.tokenizer import Tokenizer
from tests.unit.router.model_formats.answers import NESTED, NOW, PARIS, TOOLS, Call, parse, parts

VOCAB = 300
EOS = 2
SPECIAL = 1  # a token of the tiny vocabulary that is no text
# Where the grammar's canonical form is not that of the recorded answers.
CANONICAL = {
    "granite": ("", ""),
    "llama3_json": ("", ""),
    "mistral": ("[TOOL_CALLS] [", "[TOOL_CALLS]["),
    "harmony": ("<|call|>", ""),
    "minimax_m2": ("", ""),
}
BROKEN: Mapping[str, tuple[str, str]] = {  # a text in the call of PARIS, and what makes it invalid
    **{format: ('"days": 2', '"days": "2"') for format in WRITERS},
    "function_gemma": ("days:2", "days:<escape>2<escape>"),
    "gemma4": ("days:2", "days:two"),
    "glm": ("<arg_value>2<", "<arg_value>two<"),
    "minimax_m2": (">2<", ">two<"),
    "qwen3_coder": ("\n2\n", "\ntwo\n"),
    "llama4_pythonic": ("days=2", "days='2'"),
    "pythonic": ("days=2", "days=two"),
}


class Model:
    """A vocabulary, and what a grammar allows in it."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = Tokenizer.load(model_dir)
        self._compiler = GrammarCompiler.load(model_dir, VOCAB, [EOS])

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def refused_at(self, text: str | Constraint, tokens: list[int]) -> int | None:
        """The number of tokens that were allowed, if the next is not, or if the answer may not end after all."""
        constraint = lark(text, "") if isinstance(text, str) else text
        matcher = self._compiler.compile(constraint.grammar)
        for number, token in enumerate(tokens):
            if matcher.is_complete or not matcher.allowed(frozenset([EOS]))[token]:
                return number
            matcher.consume([token])
        return None if matcher.is_complete or matcher.allowed(frozenset([EOS]))[EOS] else len(tokens)

    def allows(self, text: str | Constraint, answer: str) -> bool:
        return self.refused_at(text, self.tokens(answer)) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, seed=1, eos_token_id=EOS))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tmp_path_factory.mktemp("grammars"))


def written(format: str, *calls: tuple[str, dict[str, Any]]) -> str:
    text = WRITERS[format](calls).replace(*CANONICAL.get(format, ("", "")))
    return text.replace("'", '"').replace("True", "true") if "pythonic" in format else text


def of(format: str, mode: Mode, *, is_parallel: bool = True, tools: Mapping[str, dict[str, Any]] = TOOLS) -> str:
    return grammar(Formats(TOOL_FORMATS[format]), tools, mode, is_parallel=is_parallel)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("format", WRITERS)
def test_valid_calls_are_allowed(model: Model, format: str, mode: Mode) -> None:
    made = of(format, mode)
    one, nested = ("get_weather", PARIS), ("get_weather", NESTED)
    assert model.allows(made, written(format, one))
    assert model.allows(made, written(format, nested))
    assert model.allows(made, written(format, one, NOW)) == (format != "harmony")


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("format", WRITERS)
def test_what_is_no_valid_call_is_refused(model: Model, format: str, mode: Mode) -> None:
    made = of(format, mode)
    good = written(format, ("get_weather", PARIS))
    bad = good.replace(*BROKEN[format])
    assert bad != good
    assert not model.allows(made, bad)
    assert not model.allows(made, written(format, ("get_weather", {"days": 2})))  # city is required
    assert not model.allows(made, written(format, ("launch", {})))
    for size in range(good.index("get_weather") + 1, good.rindex("2"), 3):  # cut off
        assert not model.allows(made, good[:size])


@pytest.mark.parametrize("format", WRITERS)
def test_required_calls_are_all_there_is(model: Model, format: str) -> None:
    made = of(format, Mode.REQUIRED)
    good = written(format, ("get_weather", PARIS))
    assert not model.allows(made, "It rains.")
    assert not model.allows(made, good + " It rains.")
    assert not model.allows(made, "")


@pytest.mark.parametrize("format", WRITERS)
def test_a_named_tool_is_the_only_one(model: Model, format: str) -> None:
    made = of(format, Mode.REQUIRED, is_parallel=False, tools={"now": TOOLS["now"]})
    assert model.allows(made, written(format, NOW))
    assert not model.allows(made, written(format, ("get_weather", PARIS)))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("format", WRITERS)
def test_calls_that_are_not_parallel(model: Model, format: str, mode: Mode) -> None:
    made = of(format, mode, is_parallel=False)
    assert model.allows(made, written(format, NOW))
    assert not model.allows(made, written(format, NOW, NOW))


@pytest.mark.parametrize("format", sorted(WRITERS.keys() - {"harmony"}))
def test_text_is_free_until_a_call(model: Model, format: str) -> None:
    made = of(format, Mode.AUTO)
    assert model.allows(made, "It {rains} [a lot]:\n\n<b>yes</b> <")
    assert model.allows(made, "")
    for trigger in TOOL_FORMATS[format].triggers:
        assert not model.allows(made, f"So: {trigger}no call")
    if format not in ("llama3_json", "pythonic"):
        assert model.allows(made, "Let me look.\n" + written(format, ("get_weather", PARIS)))


def test_harmonys_channels_are_free_until_a_call(model: Model) -> None:
    made, required = of("harmony", Mode.AUTO), of("harmony", Mode.REQUIRED)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call, final = written("harmony", ("get_weather", PARIS)), "<|channel|>final<|message|>It rains."
    assert model.allows(made, thought + thought + call)
    assert model.allows(made, thought + final)
    assert model.allows(required, thought + call)
    assert not model.allows(required, thought + final)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("format", ["hermes", "llama3_json", "pythonic"])
def test_reasoning_that_the_prompt_opened_is_free(model: Model, format: str, mode: Mode) -> None:
    formats = Formats(TOOL_FORMATS[format], REASONINGS["deepseek_r1"])
    made = grammar(formats, TOOLS, mode, is_reasoning_opened=True)
    call = written(format, ("get_weather", PARIS))
    assert model.allows(made, f"A <tool_call>?</think>\n\n{call}")
    assert model.allows(made, f"A [{{?</think>{call}")
    assert not model.allows(made, f"A <tool_call>?</think>\n\n{call[:-4]}")
    assert not model.allows(made, "Hm.")
    assert model.allows(made, "Hm.</think>It rains.") == (mode is Mode.AUTO)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("format", "marker"), [("hermes", "<tool_call>"), ("mistral_args", "[ARGS]"), ("gemma4", '<|"|>')]
)
def test_markers_that_are_tokens(model: Model, format: str, marker: str, mode: Mode) -> None:
    made = grammar(Formats(TOOL_FORMATS[format]), TOOLS, mode, special={marker: SPECIAL})
    answer = written(format, ("get_weather", {"city": "Paris"}))
    pieces = answer.split(marker)
    tokens = model.tokens(pieces[0])
    for piece in pieces[1:]:
        tokens += [SPECIAL, *model.tokens(piece)]
    assert model.refused_at(made, tokens) is None
    assert not model.allows(made, answer) or (mode is Mode.AUTO and format == "hermes")  # as text it is free


@pytest.mark.parametrize("format", ["qwen3_coder", "glm", "minimax_m2", "gemma4", "function_gemma"])
def test_bare_strings_are_as_the_schema_wants(model: Model, format: str) -> None:
    tools = {
        "pick": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"]},
                "code": {"type": "string", "minLength": 2, "maxLength": 4},
                "maybe": {"type": ["integer", "null"]},
            },
            "required": ["unit"],
        }
    }
    made = of(format, Mode.REQUIRED, tools=tools)
    for values, is_valid in (
        ({"unit": "C"}, True),
        ({"unit": "K"}, False),
        ({"unit": "F", "code": "abc"}, True),
        ({"unit": "F", "code": "a"}, False),
        ({"unit": "F", "code": "abcde"}, False),
        ({"unit": "F", "maybe": 3}, True),
        ({"unit": "F", "maybe": "x"}, False),
        ({"unit": "F", "code": "ab", "maybe": None}, True),
        ({"unit": "F", "other": 1}, False),
    ):
        assert model.allows(made, written(format, ("pick", values))) == is_valid, values


@pytest.mark.parametrize("format", ["qwen3_coder", "gemma4"])
@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "a+"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}]
)
def test_what_a_format_cannot_write_is_refused(format: str, schema: dict[str, Any]) -> None:
    tools = {"pick": {"type": "object", "properties": {"code": schema}}}
    with pytest.raises(InputError, match=r"pick.*code"):
        of(format, Mode.REQUIRED, tools=tools)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("format", WRITERS)
def test_arguments_that_need_not_fit_are_free(model: Model, format: str, mode: Mode) -> None:
    """The model may leave out what is required, and write values of other types."""
    made = of(format, mode, tools={name: FreeArguments(schema) for name, schema in TOOLS.items()})
    for arguments in (PARIS, NESTED, {"city": "Paris"}, {"days": 2}, {"city": 7, "days": "two"}, {}):
        assert model.allows(made, written(format, ("get_weather", arguments))), arguments
    assert not model.allows(made, written(format, ("launch", {})))


NOT_JSON = ("function_gemma", "gemma4", "glm", "minimax_m2", "qwen3_coder", "llama4_pythonic", "pythonic")


@pytest.mark.parametrize("format", NOT_JSON)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]}, "leave 'anyOf' out"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, r"leave '\$ref' out"),
        ({"type": "object", "minProperties": 1}, "leave 'minProperties' out"),
        ({"properties": {"a<b": {"type": "integer"}, "my key:": {"type": "integer"}}}, "cannot be the name"),
        ({"properties": None}, "properties: expected an object of schemas"),
        ({"properties": [1]}, "properties: expected an object of schemas"),
        ({"properties": {"a": 1}}, "properties: expected an object of schemas"),
        ({"properties": {}, "required": None}, "required: expected a list of names"),
        ({"properties": {}, "required": [{}]}, "required: expected a list of names"),
    ],
)
def test_what_objects_cannot_be_held_to_is_refused(format: str, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"^tools: pick: .*{reason}"):
        of(format, Mode.REQUIRED, tools={"pick": schema})


@pytest.mark.parametrize("format", ["qwen3_coder", "glm", "minimax_m2"])
def test_a_bare_value_that_reads_as_another_type_is_refused(format: str) -> None:
    with pytest.raises(InputError, match=r"pick: code: .*reads '1' as another type"):
        of(format, Mode.REQUIRED, tools={"pick": {"properties": {"code": {"enum": ["1", 2]}}}})


BARE = ("function_gemma", "gemma4", "glm", "minimax_m2", "qwen3_coder")  # formats that write strings without escapes
CODE = '\nif a < "b\\":\n\tgo()\n'


def with_input(format: str, syntax: str, definition: str) -> Constraint:
    text = TextGrammar.parse(syntax, definition, "tools.0.custom.format")
    tools = {"run": input_schema(GrammarText("input0", text.regex, "tools.0.custom.format"))}
    return joined(of(format, Mode.REQUIRED, tools=tools), (), "tools", {"input0": text.escaped})


def with_code(format: str, text: str) -> str:
    call = WRITERS[format]([("run", {"input": text})]).replace(*CANONICAL.get(format, ("", "")))
    if format == "minimax_m2":
        return call.replace(text, f"\n{text}\n")  # its template leaves line breaks out that are not a part of the value
    return call.replace(repr(text), json.dumps(text)) if "pythonic" in format else call


@pytest.mark.parametrize("syntax", ["regex", "lark"])
@pytest.mark.parametrize("format", WRITERS)
def test_the_input_of_a_custom_tool_satisfies_its_grammar(model: Model, format: str, syntax: str) -> None:
    definition = r'\nif a < "b\\":\n(\t[a-z]+\(\)\n)+'
    if syntax == "lark":
        definition = 'start: "\\nif a < \\"b\\\\\\":\\n" line+\nline: /\\t[a-z]+\\(\\)\\n/'
        if format in BARE:
            with pytest.raises(InputError, match=r"bare text.*use syntax 'regex'"):
                with_input(format, syntax, definition)
            return
    made = with_input(format, syntax, definition)
    answer = with_code(format, CODE)
    assert model.allows(made, answer)
    for other in (CODE[1:], CODE[:-1], CODE + "\tno", CODE.replace('"', "'"), ""):
        assert not model.allows(made, with_code(format, other)), other
    assert input_of(format, answer) == CODE


@pytest.mark.parametrize("format", WRITERS)
def test_whatever_the_grammar_lets_through_is_an_input_of_it(grammars: Grammars, format: str) -> None:
    definition = r'[a-c"\\<>/\n]{2,4}'
    made, plain = grammars.of(with_input(format, "regex", definition)), grammars.of(regex(definition, ""))
    answers = [answer for seed in range(40) if (answer := grammars.answer(made, Random(seed), most=400)) is not None]
    assert answers
    for answer in answers:
        assert grammars.accepts(plain, input_of(format, answer)), answer


def input_of(format: str, answer: str) -> str:
    parser = AnswerParser(Formats(TOOL_FORMATS[format]), {"run": input_schema({"type": "string"})})
    events = [event for char in answer for event in parser.feed(char)] + parser.finish()
    first = [event.text for event in events if isinstance(event, CallArguments) and event.index == 0]
    decoder = InputDecoder()
    return "".join(map(decoder.feed, first))


def test_a_required_property_must_be_known() -> None:
    with pytest.raises(InputError, match="'code'"):
        of("glm", Mode.REQUIRED, tools={"pick": {"type": "object", "required": ["code"]}})


@pytest.mark.parametrize(("formats", "tools"), [(Formats(), TOOLS), (Formats(TOOL_FORMATS["hermes"]), {})])
def test_there_must_be_a_format_and_a_tool(formats: Formats, tools: Mapping[str, dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="tools"):
        grammar(formats, tools, Mode.AUTO)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("format", WRITERS)
def test_the_parser_reads_what_a_grammar_allows(model: Model, format: str, mode: Mode) -> None:
    """Marks inside a value: a grammar refuses them, or the parser finds the value whole."""
    made = of(format, mode)
    content = "</parameter></arg_value>\n<parameter=x>"
    answer = written(format, ("get_weather", {"city": content, "days": 2}))
    if model.allows(made, answer):
        (call,) = parts(parse(Formats(TOOL_FORMATS[format]), [answer]))
        assert isinstance(call, Call)
        assert (call.name, call.arguments) == ("get_weather", {"city": content, "days": 2})
    else:
        assert format in ("glm", "minimax_m2", "qwen3_coder")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"tree": {"items": {"$ref": "#"}}}}, r"\$ref: expected one to #/\$defs, .* got '#'"),
        ({"properties": {"a": {}, "b": {"$ref": "#/properties/a"}}}, "got '#/properties/a'"),
        ({"properties": {"a": False}, "required": ["a"]}, "'a' is required, and its schema allows nothing"),
    ],
    ids=["the whole", "another property", "never"],
)
def test_a_property_that_its_own_text_could_not_be_held_to_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parameters({"type": "object", **schema}, re.compile(r"\w+"), "f")


def test_a_property_that_may_never_be_there_is_left_out_and_definitions_are_known() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}, "never": False}, "$defs": {"n": {"type": "integer"}}}
    [(name, own, is_required)] = parameters(schema, re.compile(r"\w+"), "f")
    assert (name, own["$ref"], own["$defs"], is_required) == ("a", "#/$defs/n", schema["$defs"], False)
