"""Tools and reasoning through the official client: what the model reads, what clients get, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.edge import http
from router.texts.chat import described
from tandem.testing.models import write_tiny_llama
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
EOS = 2
HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: dict[str, Any] = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, TIME)]
FLAT = [{"type": "function", **each} for each in (WEATHER, TIME)]
PB = [
    pb.Tool(name=each["name"], description=each.get("description", ""), parameters=json.dumps(each["parameters"]))
    for each in (WEATHER, TIME)
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
# The tiny model's, with reasoning, a setting for it, and tools.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + ' of ' + call.function.arguments.city + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"
)


@pytest.fixture
def max_model_tokens() -> int:
    return 2048  # a token is a character here, and tools are described


@pytest.fixture(scope="module")
def thinking_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("thinking"), max_positions=2048, eos_token_id=EOS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def says(cluster: Cluster, text: str) -> None:
    """And ends."""
    tokens = [*cluster.says(text), EOS]
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: tokens


def work(cluster: Cluster) -> Any:
    return [*cluster.decode.works.values()][-1]


def prompt(cluster: Cluster) -> str:
    return cluster.tokenizer.decode(list(work(cluster).prompt), skip_special_tokens=False)


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


async def chat(cluster: Cluster, **fields: Any) -> Any:
    answer = await cluster.openai.chat.completions.create(**{"model": MODEL, "messages": HI, "tools": TOOLS} | fields)
    return answer.choices[0]


async def test_calls_come_with_their_ids_and_end_the_answer(cluster: Cluster) -> None:
    says(cluster, CALL + OTHER)
    choice = await chat(cluster)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert called(choice.message) == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids), "Mistral's templates take no others"
    assert not work(cluster).sampling.HasField("grammar"), "nothing is asked for that needs one"
    assert '"Weather of a city"' in prompt(cluster), "described to a model whose template knows no tools"


async def test_text_before_a_call_stays_and_text_alone_is_no_call(cluster: Cluster) -> None:
    says(cluster, "Let me see. " + CALL)
    choice = await chat(cluster)
    assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
    says(cluster, "No <tool_call> here.")
    choice = await chat(cluster)
    assert (choice.message.content, choice.finish_reason) == ("No <tool_call> here.", "stop")
    assert choice.message.tool_calls is None


async def test_a_stream_has_the_same_calls(cluster: Cluster) -> None:
    says(cluster, "Let me see. " + CALL + OTHER)
    async with cluster.openai.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS, n=2) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    ids = set()
    for choice in final.choices:
        assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
        assert called(choice.message) == [("get_weather", {"city": "Paris"}), ("get_time", {})]
        ids |= {call.id for call in choice.message.tool_calls}
    assert len(ids) == 4


async def test_logprobs_of_all_tokens_come_with_calls(cluster: Cluster) -> None:
    says(cluster, CALL)
    chunks = [
        chunk.choices[0]
        async for chunk in await cluster.openai.chat.completions.create(
            model=MODEL, messages=HI, tools=TOOLS, logprobs=True, stream=True
        )
    ]
    tokens = [each.token for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    whole = await chat(cluster, logprobs=True)
    assert tokens == [each.token for each in whole.logprobs.content]
    assert "".join(tokens).startswith(CALL)


async def test_long_answers_are_read_in_a_thread_with_the_same_result(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(cluster, "Let me see. " + CALL + OTHER)
    short = await chat(cluster, n=2)
    monkeypatch.setattr(http, "INLINE_ANSWER_CHARS", 0)
    long = await chat(cluster, n=2)
    assert long.message.model_dump(exclude={"tool_calls": {"__all__": {"id"}}}) == short.message.model_dump(
        exclude={"tool_calls": {"__all__": {"id"}}}
    )


async def test_an_answer_cut_in_a_call_says_so(cluster: Cluster) -> None:
    says(cluster, CALL)
    choice = await chat(cluster, max_tokens=len(cluster.says(CALL)) - 20)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city"')


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, True),
        ({"parallel_tool_calls": True}, False),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [{"type": "function", "function": WEATHER | {"strict": True}}]}, True),
        ({"tool_choice": "none", "tools": [{"type": "function", "function": WEATHER | {"strict": True}}]}, False),
        ({"response_format": {"type": "json_object"}}, True),
    ],
    ids=str,
)
async def test_a_grammar_keeps_what_was_asked_for(
    cluster: Cluster, fields: dict[str, Any], is_constrained: bool
) -> None:
    says(cluster, "x")
    await chat(cluster, **fields)
    assert work(cluster).sampling.HasField("grammar") is is_constrained


async def test_a_named_tool_is_the_only_one_that_may_be_called(cluster: Cluster) -> None:
    says(cluster, CALL)
    choice = await chat(cluster, tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert choice.message.tool_calls is None
    assert "get_weather" not in work(cluster).sampling.grammar
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = await chat(cluster, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert choice.message.tool_calls is None


async def test_a_named_tool_is_called_once(cluster: Cluster) -> None:
    """Else a small model goes on calling it until the context ends."""

    async def grammar(**fields: Any) -> str:
        says(cluster, "x")
        await chat(cluster, **fields)
        return str(work(cluster).sampling.grammar)

    name = {"type": "function", "function": {"name": "get_time"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [name]}}
    once = await grammar(tool_choice=allowed, parallel_tool_calls=False)
    assert await grammar(tool_choice=allowed) != once
    for fields in ({}, {"parallel_tool_calls": True}):
        assert await grammar(tool_choice=name, **fields) == once


async def test_none_forbids_calls_and_still_describes_the_tools(cluster: Cluster) -> None:
    says(cluster, CALL)
    choice = await chat(cluster, tool_choice="none")
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert "get_weather" in prompt(cluster)


async def test_calls_and_results_go_back_to_the_model(cluster: Cluster) -> None:
    says(cluster, CALL)
    first = await chat(cluster)
    call_id = first.message.tool_calls[0].id
    history = [
        *HI,
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call_id, "content": "It rains."},
    ]
    says(cluster, "Rain.")
    assert (await chat(cluster, messages=history)).message.content == "Rain."
    text = prompt(cluster)
    assert text.index('"city": "Paris"') < text.index("<tool_response>\nIt rains.\n</tool_response>")


async def test_what_an_sdk_has_read_from_an_answer_goes_back_without_effect(cluster: Cluster) -> None:
    prompts = []
    for parsed, arguments in (({}, {}), ({"parsed": None}, {"parsed_arguments": {"city": "Oslo"}})):
        call = {"name": "get_weather", "arguments": '{"city": "Paris"}'} | arguments
        history = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
            | parsed,
            {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
        ]
        says(cluster, "Rain.")
        await chat(cluster, messages=history)
        prompts.append(prompt(cluster))
    assert prompts[0] == prompts[1]
    assert "Paris" in prompts[1]
    assert "Oslo" not in prompts[1]


BROKEN = {"name": "f", "arguments": "{"}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools.0.function.name", "pattern"),
        (
            {"tools": [{"type": "function", "function": TIME | {"parameters": []}}]},
            "tools.0.function.parameters",
            "JSON",
        ),
        (
            {"tools": [{"type": "function", "function": TIME | {"parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
            "object",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "function"),
        ({"tools": []} | {"tool_choice": "required"}, "tool_choice", "tools beside it"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "get_weather, get_time"),
        ({"tool_choice": "always"}, "tool_choice", "required"),
        ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "x"}]}, "messages.0.tool_call_id", "earlier"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLS}]}, "messages.0.tool_calls", "assistant"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALLS[0], "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "JSON object",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "tool"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "does not reason"),
        ({"chat_template_kwargs": {"tone": "kind"}}, "chat_template_kwargs.tone", "does not read"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "server's own"),
    ],
    ids=lambda each: str(each)[:60],
)
async def test_what_is_wrong_is_refused_by_its_field(
    cluster: Cluster, fields: dict[str, Any], param: str, reason: str
) -> None:
    reply = await cluster.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HI, "tools": TOOLS} | fields
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert reason in error["message"]


async def test_a_keyword_that_no_grammar_can_keep_is_refused_by_its_pointer(cluster: Cluster) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": schema}}]
    says(cluster, "x")
    assert (await chat(cluster, tools=tools)).message.content == "x", "nothing is promised about it"
    reply = await cluster.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HI, "tools": tools, "tool_choice": "required"}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tools.1.function.parameters")
    assert "/properties/a/uniqueItems" in error["message"]


class TestThinking:
    """A model whose template opens the reasoning itself."""

    @pytest.fixture
    def model_dir(self, thinking_dir: Path) -> Path:
        return thinking_dir

    async def test_reasoning_is_apart_from_the_answer(self, cluster: Cluster) -> None:
        says(cluster, "Hm, <tool_call>?\n</think>\n\n" + CALL)
        choice = await chat(cluster)
        assert choice.message.reasoning_content == "Hm, <tool_call>?"
        assert called(choice.message) == [("get_weather", {"city": "Paris"})]
        says(cluster, "Hm.</think>Rain.")
        create = cluster.openai.chat.completions.create
        deltas = [chunk.choices[0].delta async for chunk in await create(model=MODEL, messages=HI, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
        assert "".join(delta.content or "" for delta in deltas) == "Rain."

    async def test_it_can_be_turned_off(self, cluster: Cluster) -> None:
        says(cluster, "Rain.")
        settings = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        for fields in (settings, {"reasoning_effort": "none"}):
            choice = await chat(cluster, **fields)
            assert choice.message.content == "Rain."
            assert "<think>" not in prompt(cluster)
        await chat(cluster, reasoning_effort="high")
        assert prompt(cluster).endswith("<think>\n")

    async def test_earlier_reasoning_and_calls_are_the_templates(self, cluster: Cluster) -> None:
        says(cluster, "Hm.</think>" + CALL)
        first = await chat(cluster)
        history = [*HI, first.message.model_dump(exclude_none=True)]
        await chat(cluster, messages=[*history, {"role": "user", "content": "And?"}])
        assert "<think>Hm.</think><tool_call>get_weather of Paris</tool_call>" in prompt(cluster)

    async def test_a_constraint_begins_after_the_reasoning(self, cluster: Cluster) -> None:
        says(cluster, "Hm.</think>{}")
        choice = await chat(cluster, tools=[], response_format={"type": "json_object"})
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "{}")
        assert "</think>" in work(cluster).sampling.grammar

    async def test_responses_have_it_as_an_item(self, cluster: Cluster) -> None:
        says(cluster, "Hm.</think>" + CALL)
        async with cluster.openai.responses.stream(model=MODEL, input="Hi", tools=FLAT) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_response()
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]
        assert answer.output[0].content[0].text == "Hm."
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= {event.type for event in events}

    async def test_each_reasoning_that_comes_back_is_in_the_prompt(self, cluster: Cluster) -> None:
        def thought(text: str) -> dict[str, Any]:
            return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], "summary": []}

        call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'}
        said = {"type": "message", "role": "assistant", "content": "Let me see."}
        asked = {"role": "user", "content": "Weather?"}
        says(cluster, "Rain.")
        for items, expected in (
            ([asked, thought("One"), said, thought("Two"), call], "<think>One\nTwo</think>"),
            ([asked, thought("One"), thought("Two"), call], "<think>One\nTwo</think>"),
            ([asked, thought("One"), asked], "<think>One</think>"),
            ([asked, thought("One")], "<think>One</think>"),
        ):
            await cluster.openai.responses.create(model=MODEL, input=items, tools=FLAT)
            assert expected in prompt(cluster)

    async def test_logprobs_are_of_the_text_as_a_stream_has_them(self, cluster: Cluster) -> None:
        says(cluster, "Hm.</think>Rain, or not." + CALL)
        fields: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": FLAT}
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
        whole = await cluster.openai.responses.create(**fields)
        async with cluster.openai.responses.stream(**fields) as stream:
            streamed = await stream.get_final_response()
        texts = []
        for answer in (whole, streamed):
            (part,) = next(item for item in answer.output if item.type == "message").content
            texts.append("".join(each.token for each in part.logprobs))
        assert texts[0] == texts[1]
        assert "Hm." not in texts[0]
        assert texts[0].startswith("Rain, or not.")


class TestResponses:
    async def test_calls_are_items_and_their_outputs_go_back(self, cluster: Cluster) -> None:
        says(cluster, "Let me see. " + CALL)
        create = cluster.openai.responses.create
        first = await create(model=MODEL, input="Weather?", tools=FLAT, tool_choice="auto")
        message, call = first.output
        assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
            "Let me see. ",
            "get_weather",
            {"city": "Paris"},
        )
        assert first.tools[0].name == "get_weather"
        items = [
            {"role": "user", "content": "Weather?"},
            *[item.model_dump(exclude_none=True) for item in first.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."},
        ]
        says(cluster, "Rain.")
        assert (await create(model=MODEL, input=items, tools=FLAT)).output_text == "Rain."
        assert "It rains." in prompt(cluster)

    async def test_a_stream_has_the_same_items(self, cluster: Cluster) -> None:
        says(cluster, "Let me see. " + CALL + OTHER)
        whole = await cluster.openai.responses.create(model=MODEL, input="Hi", tools=FLAT)
        async with cluster.openai.responses.stream(model=MODEL, input="Hi", tools=FLAT) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == [*range(len(events))]
        kept = {"type", "name", "arguments", "status"}
        assert [item.model_dump(include=kept) for item in final.output] == [
            item.model_dump(include=kept) for item in whole.output
        ]
        added = [event.output_index for event in events if event.type == "response.output_item.added"]
        assert added == [0, 1, 2]

    async def test_a_call_that_is_cut_off_is_incomplete(self, cluster: Cluster) -> None:
        tokens = cluster.says(CALL)
        create = cluster.openai.responses.create
        answer = await create(model=MODEL, input="Hi", tools=FLAT, max_output_tokens=len(tokens) - 20)
        assert answer.status == "incomplete"
        assert answer.output[0].status == "incomplete"
        says(cluster, CALL.replace('"Paris"}}', "!"))
        answer = await create(model=MODEL, input="Hi", tools=FLAT)
        assert (answer.output[0].type, answer.output[0].status) == ("function_call", "incomplete")

    async def test_the_text_can_be_constrained(self, cluster: Cluster) -> None:
        says(cluster, "{}")
        format = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
        await cluster.openai.responses.create(model=MODEL, input="Hi", text={"format": format, "verbosity": "low"})
        assert work(cluster).sampling.HasField("grammar")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [{"type": "web_search"}]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": FLAT, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
            ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
            ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
            ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ],
        ids=lambda each: str(each)[:60],
    )
    async def test_what_is_wrong_is_refused_by_its_field(
        self, cluster: Cluster, fields: dict[str, Any], param: str
    ) -> None:
        reply = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_results_and_a_text_next_to_them_are_one_message_for_templates_that_alternate() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},  # as the client sent them
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "and?"},
    ]
    plain = described(messages, [])
    assert [each["role"] for each in plain] == ["user", "user", "assistant", "user"]
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert plain[-1]["content"] == f"{results}\nand?"
