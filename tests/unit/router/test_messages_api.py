"""Anthropic's Messages API through its official client: answers, streams, tools, thinking, refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from router.edge.anthropic.messages_errors import messages_error
from router.edge.anthropic.messages_schema import CountTokensRequest
from router.edge.body_parsing import parse_fields
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import WIRE, ErrorCode
from tandem.testing.models import write_tiny_llama
from tests.unit.router.conftest import MODEL, Cluster
from tests.unit.router.test_tools import CALL, EOS, OTHER, TEMPLATE, prompt, says, work

HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": HI}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]
CACHED = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def max_model_tokens() -> int:
    return 2048  # a token is a character here, and tools are described


@pytest.fixture(scope="module")
def thinking_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("thinking"), max_positions=2048, eos_token_id=EOS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def anthropic() -> Any:
    """The official client. Its import takes seconds, so only the process that runs this file pays for it."""
    return import_module("anthropic")


@pytest.fixture
async def claude(cluster: Cluster, anthropic: Any) -> AsyncIterator[Any]:
    """Its overloads know no bodies from a dict."""
    plain = anthropic.DefaultAsyncHttpxClient(timeout=60, verify=False)
    client = anthropic.AsyncAnthropic(base_url=cluster.base_url, api_key="none", max_retries=0, http_client=plain)
    yield client
    await client.close()


def parts(message: Any) -> list[Any]:
    """The content: texts of text, and tuples of other blocks."""
    found: list[Any] = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(block.text)
            case "thinking":
                found.append(("thinking", block.thinking))
            case _:
                found.append((block.name, block.input))
    return found


class TestText:
    async def test_an_answer_has_its_text_and_its_usage(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "It rains.")
        answer = await claude.messages.create(**BODY, system=[{"type": "text", "text": "Be brief."}])
        assert parts(answer) == ["It rains."]
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert answer.id.startswith("msg_")
        assert answer.usage.output_tokens == len(cluster.tokenizer.encode("It rains.", add_special_tokens=False)) + 1
        assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(work(cluster).prompt)
        assert answer.usage.cache_creation_input_tokens == 0
        assert prompt(cluster).index("system\nBe brief.") < prompt(cluster).index("user\nWeather?")

    async def test_a_stream_has_the_same_answer_with_all_events(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "It rains.")
        whole = await claude.messages.create(**BODY)
        async with claude.messages.stream(**BODY) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert parts(final) == parts(whole)
        assert final.stop_reason == "end_turn"
        used = (final.usage.input_tokens + final.usage.cache_read_input_tokens, final.usage.output_tokens)
        assert used == (whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole.usage.output_tokens)
        kinds = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
        assert [each for each in events if each in kinds] == kinds

    async def test_events_have_anthropics_order_and_names(self, cluster: Cluster) -> None:
        says(cluster, "ab")
        reply = await cluster.http.post("/v1/messages?beta=true", json=BODY | {"stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [each.split("\n") for each in reply.text.strip().split("\n\n")]
        datas = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name.removeprefix("event: ") for name, _ in events] == [each["type"] for each in datas]
        kinds = [each["type"] for each in datas]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[3:-3]) == {"content_block_delta"}
        assert datas[0]["message"]["usage"]["input_tokens"] == len(work(cluster).prompt)

    async def test_the_limit_and_a_stop_sequence_say_so(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "It rains. And more.")
        answer = await claude.messages.create(**BODY | {"max_tokens": 4})
        assert (parts(answer), answer.stop_reason) == (["It r"], "max_tokens")
        answer = await claude.messages.create(**BODY, stop_sequences=["snow", ". A"])
        assert (parts(answer), answer.stop_reason, answer.stop_sequence) == (["It rains"], "stop_sequence", ". A")
        async with claude.messages.stream(**BODY, stop_sequences=["snow", ". A"]) as stream:
            final = await stream.get_final_message()
        assert (parts(final), final.stop_reason, final.stop_sequence) == (["It rains"], "stop_sequence", ". A")

    async def test_more_tokens_than_the_context_has_end_there(self, cluster: Cluster, claude: Any) -> None:
        tokens = cluster.says("x" * 3000)
        for worker in (cluster.prefill, cluster.decode):
            worker.behaviour.answer = lambda prompt: tokens
        answer = await claude.messages.create(**BODY | {"max_tokens": 8000})
        assert answer.stop_reason == "model_context_window_exceeded"
        assert len(work(cluster).prompt) + answer.usage.output_tokens == 2048

    async def test_sampling_and_the_session_reach_the_worker(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "x")
        fields = {"temperature": 0.5, "top_p": 0.75, "top_k": 7}
        await claude.messages.create(**BODY, metadata={"user_id": "u1"}, service_tier="auto", extra_body=fields)
        sampling = work(cluster).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 7)

    async def test_turns_of_one_role_are_one_and_cache_control_changes_nothing(
        self, cluster: Cluster, claude: Any
    ) -> None:
        says(cluster, "x")
        blocks = [
            {"type": "text", "text": "One", "cache_control": CACHED},
            {"type": "text", "text": "two", "citations": None},
        ]
        history = [{"role": "user", "content": blocks}, {"role": "user", "content": "three"}]
        await claude.messages.create(**BODY | {"messages": history}, cache_control=CACHED)
        assert "user\nOne\ntwo\nthree<" in prompt(cluster)

    async def test_a_schema_constrains_the_answer(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "{}")
        format = {"type": "json_schema", "schema": SCHEMA}
        await claude.messages.create(**BODY, output_config={"format": format})
        assert work(cluster).sampling.HasField("grammar")
        await claude.messages.create(**BODY, extra_body={"output_format": format})
        assert work(cluster).sampling.HasField("grammar")

    async def test_an_answer_of_white_space_is_one(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, " \n")
        assert parts(await claude.messages.create(**BODY)) == [" \n"]


class TestTools:
    async def test_calls_are_blocks_and_results_go_back(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "Let me see. " + CALL + OTHER)
        first = await claude.messages.create(**BODY, tools=TOOLS)
        assert parts(first) == ["Let me see. ", ("get_weather", {"city": "Paris"}), ("get_time", {})]
        assert first.stop_reason == "tool_use"
        assert '"Weather of a city"' in prompt(cluster)
        _, weather, time = first.content
        results = [
            {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "It rains."}]},
            {"type": "tool_result", "tool_use_id": time.id, "content": "no clock", "is_error": True},
            {"type": "text", "text": "Go on."},
        ]
        history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        says(cluster, "Rain.")
        assert parts(await claude.messages.create(**BODY | {"messages": history}, tools=TOOLS)) == ["Rain."]
        text = prompt(cluster)
        places = [
            text.index(each)
            for each in (
                'Let me see. \n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
                "<tool_response>\nIt rains.\n</tool_response>",
                "<tool_response>\nError: no clock\n</tool_response>",
                "</tool_response>\nGo on.",
            )
        ]
        assert places == sorted(places)

    async def test_a_stream_has_the_same_blocks(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "Let me see. " + CALL + OTHER)
        async with claude.messages.stream(**BODY, tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert parts(final) == ["Let me see. ", ("get_weather", {"city": "Paris"}), ("get_time", {})]
        assert final.stop_reason == "tool_use"
        assert "input_json" in kinds

    async def test_white_space_beside_calls_is_no_block(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "\n" + CALL + "\n" + OTHER)
        answer = await claude.messages.create(**BODY, tools=TOOLS)
        assert [block.type for block in answer.content] == ["tool_use", "tool_use"]

    async def test_a_call_that_is_cut_off_has_what_is_there(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, CALL)
        tokens = cluster.tokenizer.encode(CALL, add_special_tokens=False)[:-18]
        answer = await claude.messages.create(**BODY | {"max_tokens": len(tokens)}, tools=TOOLS)
        _, _, city = cluster.tokenizer.decode(tokens, skip_special_tokens=False).rpartition('"')
        assert parts(answer) == [("get_weather", {"city": city})]
        assert city in ("P", "Pa", "Par", "Pari")
        assert answer.stop_reason == "max_tokens"

    @pytest.mark.parametrize(
        ("choice", "is_constrained"),
        [
            ({"type": "auto"}, False),
            ({"type": "none"}, False),
            ({"type": "any"}, True),
            ({"type": "tool", "name": "get_time"}, True),
            ({"type": "auto", "disable_parallel_tool_use": True}, True),
        ],
        ids=str,
    )
    async def test_a_grammar_keeps_the_choice(
        self, cluster: Cluster, claude: Any, choice: dict[str, Any], is_constrained: bool
    ) -> None:
        says(cluster, "x")
        await claude.messages.create(**BODY, tools=TOOLS, tool_choice=choice)
        assert work(cluster).sampling.HasField("grammar") is is_constrained

    async def test_none_forbids_calls(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, CALL)
        answer = await claude.messages.create(**BODY, tools=TOOLS, tool_choice={"type": "none"})
        assert (parts(answer), answer.stop_reason) == ([CALL], "end_turn")

    async def test_a_strict_tool_constrains(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "x")
        await claude.messages.create(**BODY, tools=[TOOLS[0] | {"strict": True, "cache_control": CACHED}])
        assert work(cluster).sampling.HasField("grammar")


class TestThinking:
    @pytest.fixture
    def model_dir(self, thinking_dir: Path) -> Path:
        return thinking_dir

    async def test_it_is_a_block_and_goes_back(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "Hm.</think>\n\n" + CALL)
        thinking = {"type": "enabled", "budget_tokens": 1024}
        first = await claude.messages.create(**BODY, tools=TOOLS, thinking=thinking)
        assert parts(first) == [("thinking", "Hm."), ("get_weather", {"city": "Paris"})]
        assert first.content[0].signature
        result = {"type": "tool_result", "tool_use_id": first.content[1].id}
        history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        says(cluster, "Rain.</think>Rain.")
        second = await claude.messages.create(**BODY | {"messages": history}, tools=TOOLS)
        assert parts(second) == [("thinking", "Rain."), "Rain."]
        assert "<think>Hm.</think>" in prompt(cluster)

    async def test_a_stream_has_the_same_blocks(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "Hm.</think>Rain.")
        async with claude.messages.stream(**BODY, thinking={"type": "adaptive"}) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert parts(final) == [("thinking", "Hm."), "Rain."]
        assert final.content[0].signature
        assert {"thinking", "signature", "text"} <= kinds

    async def test_its_text_can_be_left_out(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "Hm.</think>Rain.")
        omitted = {"type": "adaptive", "display": "omitted"}
        assert parts(await claude.messages.create(**BODY, thinking=omitted)) == [("thinking", ""), "Rain."]

    async def test_it_can_be_turned_off(self, cluster: Cluster, claude: Any) -> None:
        says(cluster, "Rain.")
        assert parts(await claude.messages.create(**BODY, thinking={"type": "disabled"})) == ["Rain."]
        assert not prompt(cluster).endswith("<think>\n")
        await claude.messages.create(**BODY)
        assert prompt(cluster).endswith("<think>\n")


async def test_a_model_that_does_not_reason_takes_the_wish(cluster: Cluster, claude: Any) -> None:
    says(cluster, "x")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = await claude.messages.create(**BODY, thinking=thinking, output_config={"effort": "max"})
    assert parts(answer) == ["x"]


@pytest.mark.parametrize(
    ("fields", "wishes"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
    ],
    ids=str,
)
def test_thinking_and_effort_are_wishes_for_the_template(fields: dict[str, Any], wishes: dict[str, Any]) -> None:
    assert parse_fields(CountTokensRequest, {"model": "m", "messages": HI} | fields).chat().wishes == wishes


async def test_tokens_are_counted_as_an_answer_counts_them(cluster: Cluster, claude: Any) -> None:
    says(cluster, "x")
    fields = {"model": MODEL, "messages": HI, "system": "Be brief.", "tools": TOOLS}
    counted = await claude.messages.count_tokens(**fields)
    await claude.messages.create(**fields, max_tokens=4)
    assert counted.input_tokens == len(work(cluster).prompt)
    told = [*HI, {"role": "assistant", "content": "It rains."}]
    more = await claude.messages.count_tokens(**fields | {"messages": told})
    assert more.input_tokens > counted.input_tokens


async def test_claude_codes_context_management_changes_nothing(cluster: Cluster, claude: Any) -> None:
    says(cluster, "x")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = await claude.beta.messages.create(
        **BODY, context_management=edits, betas=["context-management-2025-06-27"]
    )
    assert answer.content[0].text == "x"


async def test_a_repeat_under_an_idempotency_key_gets_the_same_answer(cluster: Cluster) -> None:
    says(cluster, "x")
    replies = [await cluster.http.post("/v1/messages", json=BODY, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert replies[0].content == replies[1].content
    assert replies[1].headers["idempotency-replayed"] == "true"


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


TOOL = TOOLS[0]
CALLED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALLER = "messages.0.content.0.caller"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "It"}]}, "messages.1.role"),
        (user({"type": "image"}), "messages.0.content.0.source"),
        (user({"type": "image", "source": {"type": "url", "url": "x"}}), "messages.0.content.0.source.type"),
        (
            user({"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": ""}}),
            "messages.0.content.0.source.media_type",
        ),
        (
            user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}}),
            "messages.0.content.0.source.data",
        ),
        (
            user({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
            "messages.0.content.0.source.data",
        ),
        (user({"type": "document", "source": {}}), "messages.0.content.0.type"),
        (user({"type": "tool_use", "id": "c", "name": "f", "input": {}}), "messages.0.content.0.type"),
        (user({"type": "text"}), "messages.0.content.0.text"),
        (user({"type": "text", "text": "x", "input": {}}), "messages.0.content.0.input"),
        (user({"type": "text", "text": "x", "more": 1}), "messages.0.content.0.more"),
        (user({"type": "text", "text": 1}), "messages.0.content.0.text"),
        (user({"type": "tool_result", "tool_use_id": "c"}), "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [CALLED] * 257}, *HI]}, "messages"),
        (user(CALLED | {"type": "tool_result"}), "messages.0.content.0.id"),
        ({"messages": [{"role": "assistant", "content": [CALLED | {"caller": {"type": "code"}}]}, *HI]}, CALLER),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL | {"name": "f g"}]}, "tools.0.name"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": 3}, "temperature"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 1}}}, "output_config.format.schema"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"n": 2}, "n"),
    ],
    ids=lambda each: str(each)[:60],
)
async def test_what_is_wrong_is_refused_by_its_field(cluster: Cluster, fields: dict[str, Any], field: str) -> None:
    body = {name: value for name, value in (BODY | fields).items() if value is not None}
    reply = await cluster.http.post("/v1/messages", json=body)
    answer = reply.json()
    assert (reply.status_code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    message = answer["error"]["message"]
    assert message.startswith((f"{field}:", f"unknown field '{field}'")), message
    assert answer["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (BODY | {"model": "nope"}, "NotFoundError", 404),
        (BODY | {"max_tokens": 0}, "BadRequestError", 400),
        (BODY | {"messages": [{"role": "user", "content": "x" * 70_000}]}, "APIStatusError", 413),
    ],
    ids=["not found", "bad", "large"],
)
async def test_the_client_raises_its_own_errors(
    claude: Any, anthropic: Any, body: dict[str, Any], kind: str, status: int
) -> None:
    with pytest.raises(getattr(anthropic, kind)) as raised:
        await claude.messages.create(**body)
    assert raised.value.status_code == status
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["error"]["type"] == messages_error(status, "", "").error.type


async def test_paths_below_have_the_same_errors(cluster: Cluster) -> None:
    batches = await cluster.http.post("/v1/messages/batches", json={})
    assert (batches.status_code, batches.json()["error"]["type"]) == (404, "not_found_error")
    got = await cluster.http.get("/v1/messages")
    assert (got.status_code, got.json()["error"]["type"]) == (405, "invalid_request_error")
    assert "code" in (await cluster.http.get("/v1/messages_of_others")).json()["error"], "another API's"


class TestNoWorker:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        always = Disaggregation.ALWAYS
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, queue_timeout_s=0.05)

    async def test_it_is_overloaded(self, bare: Cluster) -> None:
        reply = await bare.http.post("/v1/messages", json=BODY)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_has_a_type_of_anthropics(code: ErrorCode) -> None:
    status = WIRE[code].http_status
    special = {
        ErrorCode.UNAUTHENTICATED: "authentication_error",
        ErrorCode.PERMISSION_DENIED: "permission_error",
        ErrorCode.MODEL_NOT_FOUND: "not_found_error",
        ErrorCode.PAYLOAD_TOO_LARGE: "request_too_large",
        ErrorCode.RATE_LIMITED: "rate_limit_error",
        ErrorCode.OVERLOADED: "rate_limit_error",
        ErrorCode.NO_WORKER: "overloaded_error",
        ErrorCode.INTERNAL: "api_error",
        ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
        ErrorCode.INVALID_ARGUMENT: "invalid_request_error",
    }
    kind = messages_error(status, "m", "r").error.type
    assert kind == special.get(code, kind)
    assert (status >= 500) == (kind in ("api_error", "overloaded_error", "timeout_error"))
