"""Limits count the objects that a parser would build: marks within strings do not count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.body_parsing import parse_body
from router.edge.grpc import _constraint
from router.edge.grpc_chat import chat_of
from router.edge.openai.request_schema import ChatCompletionRequest
from router.edge.openai.responses_schema import ResponsesRequest
from router.edge.openai.tokenize import TokenizeRequest
from router.texts.json_limits import JsonLimits, check_body, check_texts
from tandem.errors import InputError
from tandem.grammar.constraint import json_schema_text, regex
from tandem.v1 import inference_pb2 as pb

STRETCH = 64 << 10


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[[],[],[]]", "objects and lists"),
        (b'{"a":{"b":{}}}', "objects and lists"),
        (b'{"a":1,"b":2,"c":3,"d":4}', "keys"),
        (b'["a","b","c","d","e"]', "strings"),
        (b"[1,2,3,4,5,6,7]", "values"),
        (b'"\\\\",[[],[],[]]', "objects and lists"),  # a string that ends in a backslash
    ],
)
def test_the_exceeded_limit_is_named(body: bytes, what: str) -> None:
    with pytest.raises(InputError, match=f"expected at most [0-9]+ {what}"):
        check_body(body, JsonLimits(containers=2, keys=3, strings=4, values=6))


TEXTS = ["[" * 200_000, "{,:" * 90_000, '\\"[' * 90_000, "\\" * 200_001, '"' * 200_000, "a" * 200_000]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_marks_within_strings_do_not_count_at_any_block_boundary(text: str, shift: int) -> None:
    body = json.dumps({"prompt": "x" * (STRETCH - 14 + shift) + text})
    check_body(body.encode(), JsonLimits(containers=1, keys=1, strings=2, values=1))


def size(value: Any) -> tuple[int, int]:
    """The numbers of containers and of strings, including keys, in a JSON value."""
    if isinstance(value, dict):
        parts = [size(each) for each in value.values()]
        return 1 + sum(part[0] for part in parts), len(value) + sum(part[1] for part in parts)
    if isinstance(value, list):
        parts = [size(each) for each in value]
        return 1 + sum(part[0] for part in parts), sum(part[1] for part in parts)
    return 0, int(isinstance(value, str))


json_values = st.recursive(
    st.text(alphabet='a"\\[{,:é') | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\[{,:'), inner),
)


@given(json_values, st.booleans())
def test_a_body_passes_at_its_own_counts_and_not_below(value: Any, ascii_only: bool) -> None:
    containers, strings = size(value)
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    padded = body + b" " * (containers + 1)  # a body shorter than the limit is not counted
    check_body(padded, JsonLimits(containers=containers, strings=strings))
    if containers:
        with pytest.raises(InputError):
            check_body(padded, JsonLimits(containers=containers - 1, strings=strings))
    if strings:
        with pytest.raises(InputError):
            check_body(padded, JsonLimits(containers=containers, strings=strings - 1))


def test_texts_of_one_request_count_together() -> None:
    texts = [("first", "[[],[]]"), ("second", '["[[[["]'), ("third", "[[]]")]
    check_texts(texts, JsonLimits(containers=6))
    with pytest.raises(InputError, match="third: expected at most 5 objects and lists") as refused:
        check_texts(texts, JsonLimits(containers=5))
    assert refused.value.field == "third"


MANY = json.dumps({"a": [[]] * 20_000})  # two of them exceed a limit
ARGUMENTS = [{"id": str(each), "type": "function", "function": {"name": "f", "arguments": MANY}} for each in range(2)]
CHAT = {"messages": [{"role": "assistant", "tool_calls": ARGUMENTS}]}
ITEMS = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": MANY}] * 2
TAG = {"type": "structural_tag", "structures": [{"begin": "<", "schema": {"enum": [[]] * 40_000}, "end": ">"}]}
OUTPUTS = {"structured_outputs": {"structural_tag": json.dumps(TAG)}}
HTTP: list[tuple[Any, dict[str, Any], str]] = [
    (ChatCompletionRequest, {"model": "m", **CHAT}, "messages.0.tool_calls.1.function.arguments"),
    (TokenizeRequest, CHAT, "messages.0.tool_calls.1.function.arguments"),
    (ResponsesRequest, {"model": "m", "input": ITEMS}, "input.1.arguments"),
    (ChatCompletionRequest, {"model": "m", "messages": [], **OUTPUTS}, "structured_outputs.structural_tag"),
]


@pytest.mark.parametrize(("kind", "body", "field"), HTTP)
def test_texts_within_a_body_are_limited(kind: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match="expected at most 32768 objects and lists") as refused:
        parse_body(kind, json.dumps(body).encode()).parse()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"tools": [pb.Tool(name="f", parameters=MANY), pb.Tool(name="g", parameters=MANY)]}, "tools.1.parameters"),
        ({"template_settings": json.dumps({"a": [[]] * 40_000})}, "template_settings"),
        (
            {"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(arguments=MANY)] * 2)]},
            "chat.messages.0.tool_calls.1.arguments",
        ),
    ],
)
def test_texts_within_a_chat_over_grpc_are_limited(chat: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match="expected at most 32768 objects and lists") as refused:
        chat_of(pb.ChatMessages(**chat))
    assert refused.value.field == field


def test_schemas_of_a_structural_tag_over_grpc_are_limited() -> None:
    tag = pb.StructuralTag(structures=[pb.StructuralTag.Structure(begin="<", schema=MANY, end=">")] * 2)
    with pytest.raises(InputError, match="expected at most 32768 objects and lists") as refused:
        _constraint(pb.Constraint(structural_tag=tag))
    assert refused.value.field == "constraint.structural_tag.structures.1.schema"


@pytest.mark.parametrize(("make", "text"), [(json_schema_text, "{" + " " * 65_536), (regex, "(" * 65_537)])
def test_the_size_of_a_constraint_is_checked_before_it_is_parsed(make: Any, text: str) -> None:
    with pytest.raises(InputError, match="constraint: expected at most 65536 bytes, got 65537"):
        make(text, "constraint")
