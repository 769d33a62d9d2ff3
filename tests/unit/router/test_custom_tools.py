"""Custom tools through the official client: what the model reads, the text that clients get, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.model_formats.custom_input import InputDecoder
from tests.unit.router.conftest import Cluster
from tests.unit.router.test_tools import HI, MODEL, TOOLS, prompt, says, work

CODE = 'print("größer \\")\n\t😀'
RUN: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs Python"}}
FLAT: dict[str, Any] = {"type": "custom", "name": "run", "description": "Runs Python"}
LARK = {"syntax": "lark", "definition": 'start: "print(" /[^)]*/ ")" REST\nREST: /(.|\\n)*/'}
NAMED = {"type": "custom", "custom": {"name": "run"}}


@pytest.fixture
def max_model_tokens() -> int:
    return 2048  # a token is a character here, and tools are described


def call(text: str, name: str = "run", **escapes: Any) -> str:
    arguments = json.dumps({"input": text}, **{"ensure_ascii": False} | escapes)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def formed(**grammar: str) -> dict[str, Any]:
    return {"type": "custom", "custom": RUN["custom"] | {"format": {"type": "grammar", "grammar": grammar}}}


async def chat(cluster: Cluster, **fields: Any) -> Any:
    answer = await cluster.openai.chat.completions.create(**{"model": MODEL, "messages": HI, "tools": [RUN]} | fields)
    return answer.choices[0]


@pytest.mark.parametrize("format", [{}, {"format": {"type": "text"}}])
async def test_a_call_carries_one_text(cluster: Cluster, format: dict[str, Any]) -> None:
    says(cluster, "Let me see. " + call(CODE))
    choice = await chat(cluster, tools=[{"type": "custom", "custom": RUN["custom"] | format}, *TOOLS])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see. ")
    (called,) = choice.message.tool_calls
    assert (called.type, called.custom.name, called.custom.input) == ("custom", "run", CODE)
    assert len(called.id) == 9
    assert work(cluster).sampling.HasField("grammar"), "a call of another form would have no input"
    assert '"Runs Python"' in prompt(cluster)
    says(cluster, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    (other,) = (await chat(cluster, tools=[RUN, *TOOLS])).message.tool_calls
    assert (other.type, other.function.name) == ("function", "get_time")


async def test_a_stream_brings_the_input_as_deltas(cluster: Cluster) -> None:
    says(cluster, call(CODE) + "\n" + call("", "run") + "\n" + call(CODE, ensure_ascii=True))
    stream = await cluster.openai.chat.completions.create(model=MODEL, messages=HI, tools=[RUN], stream=True)
    deltas = [each async for chunk in stream for each in chunk.choices[0].delta.tool_calls or ()]
    inputs = ["".join(each.custom["input"] for each in deltas if each.index == index) for index in range(3)]
    assert inputs == [CODE, "", CODE]
    first = [each for each in deltas if each.id is not None]
    assert [(each.type, each.custom["name"], each.function) for each in first] == [("custom", "run", None)] * 3
    assert len({each.id for each in first}) == 3
    assert len(deltas) > 2 * len(CODE), "it comes while it is written"


@pytest.mark.parametrize("tool", [formed(**LARK), formed(syntax="regex", definition=r'print\("[^"]*"\)(.|\n)*')])
async def test_a_grammar_is_the_models_and_the_prompts(cluster: Cluster, tool: dict[str, Any]) -> None:
    says(cluster, call(CODE))
    choice = await chat(cluster, tools=[tool], tool_choice=NAMED)
    assert choice.message.tool_calls[0].custom.input == CODE
    start, named = json.loads(work(cluster).sampling.grammar)["grammars"]
    assert f"@{named['name']} " in start["lark_grammar"]
    assert "(?-i:" in named["lark_grammar"], "of the text as JSON escapes it"
    assert "start: " in prompt(cluster) or "[^" in prompt(cluster), "the model reads what is asked for"


async def test_calls_and_results_go_back_to_the_model(cluster: Cluster) -> None:
    says(cluster, call("1 + 1"))
    first = await chat(cluster)
    history = [
        *HI,
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "2"},
    ]
    says(cluster, "Two.")
    assert (await chat(cluster, messages=history)).message.content == "Two."
    text = prompt(cluster)
    assert text.index('{"name": "run", "arguments": {"input": "1 + 1"}}') < text.index("<tool_response>\n2\n")


async def test_an_input_that_is_cut_off_comes_as_far_as_it_was_written(cluster: Cluster) -> None:
    before = cluster.says(call("abcd").partition('"}}')[0])
    says(cluster, call("abcdef"))
    choice = await chat(cluster, max_tokens=len(before))
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].custom.input in ("abc", "abcd")


async def test_allowed_tools_may_be_custom_ones(cluster: Cluster) -> None:
    says(cluster, call("x"))
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert (await chat(cluster, tools=[RUN, *TOOLS], tool_choice=allowed)).message.tool_calls[0].custom.input == "x"
    assert "get_time" not in work(cluster).sampling.grammar
    choice = await chat(cluster, tools=[formed(**LARK)], tool_choice="none")
    assert (choice.message.content, work(cluster).sampling.HasField("grammar")) == (call("x"), False)


class TestResponses:
    async def test_calls_are_items_and_their_outputs_go_back(self, cluster: Cluster) -> None:
        says(cluster, call(CODE))
        create = cluster.openai.responses.create
        form = {"format": {"type": "grammar", **LARK}}
        first = await create(
            model=MODEL, input="Go", tools=[FLAT | form], tool_choice={"type": "custom", "name": "run"}
        )
        (item,) = first.output
        assert (item.type, item.name, item.input, item.status) == ("custom_tool_call", "run", CODE, "completed")
        assert first.tools[0].format.definition == LARK["definition"]
        items = [
            {"role": "user", "content": "Go"},
            item.model_dump(exclude_none=True),
            {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ran"},
        ]
        says(cluster, "Done.")
        assert (await create(model=MODEL, input=items, tools=[FLAT])).output_text == "Done."
        assert "<tool_response>\nran\n" in prompt(cluster)

    async def test_a_stream_has_the_same_item(self, cluster: Cluster) -> None:
        says(cluster, "So: " + call(CODE))
        async with cluster.openai.responses.stream(model=MODEL, input="Hi", tools=[FLAT]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        item = final.output[1]
        assert "".join(deltas) == done.input == item.input == CODE
        assert (done.item_id, done.output_index) == (item.id, 1)
        assert [event.sequence_number for event in events] == [*range(len(events))]


BROKEN = [{"id": "c1", "type": "custom", "custom": {"name": "run"}}]
WRITTEN = {"syntax": "lark", "definition": "start: unknown"}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name", "none"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom", "none"),
        ({"tools": [formed(syntax="peg", definition="x")]}, "tools.0.custom.format.grammar.syntax", "'lark'"),
        ({"tools": [formed(syntax="lark")]}, "tools.0.custom.format.grammar.definition", "none"),
        ({"tools": [formed(syntax="regex", definition="")]}, "tools.0.custom.format.grammar.definition", "least 1"),
        ({"tools": [formed(syntax="regex", definition="^a")]}, "tools.0.custom.format.grammar.definition", "'^a'"),
        ({"tools": [formed(syntax="regex", definition="[")]}, "tools.0.custom.format.grammar.definition", "'['"),
        ({"tools": [*TOOLS, formed(**WRITTEN)]}, "tools.2.custom.format.grammar.definition", "unknown"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "x"}}}]}, None, "text"),
        ({"tools": [RUN, {"type": "function", "function": {"name": "run"}}]}, "tools", "twice"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice", "expected type 'custom'"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "one of run"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "get_time"}}},
            "tool_choice",
            "function",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "tool_calls": BROKEN}]},
            "messages.1.tool_calls.0.custom.input",
            "none",
        ),
    ],
    ids=lambda each: str(each)[:60],
)
async def test_what_is_wrong_is_refused_by_its_field(
    cluster: Cluster, fields: dict[str, Any], param: str | None, reason: str
) -> None:
    body = {"model": MODEL, "messages": HI, "tools": [RUN]} | fields
    reply = await cluster.http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param or "tools.0.custom.format.type"), error
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [FLAT | {"format": {"type": "grammar", **WRITTEN}}]}, "tools.0.format.definition"),
        ({"tools": [FLAT | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "run"}]}, "input.0.input"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
        ({"tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
    ],
    ids=lambda each: str(each)[:60],
)
async def test_responses_refuse_it_too(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    reply = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "tools": [FLAT]} | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"input": CODE}), CODE),
        (json.dumps({"input": CODE}, ensure_ascii=False), CODE),
        (' {\n"input" : "\\\\\\\\ud83d\\ud83d!\\ude00 \\ud83d\\ude00\\/"} ', "\\\\ud83d\ufffd!\ufffd 😀/"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "cut \\u00', "cut "),
        ('{"code": "x"}', '{"code": "x"}'),
        ("{}", "{}"),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_inputs_are_read_in_pieces_of_any_size(arguments: str, expected: str, size: int) -> None:
    decoder = InputDecoder()
    assert "".join(decoder.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)) == expected
