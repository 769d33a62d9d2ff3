import json
from typing import Any

import openai
import pytest

from router.requests.facts import Arrived
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}


async def test_chat_completion(cluster: Cluster) -> None:
    cluster.says("Hello, world.")
    answer = await cluster.openai.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len(cluster.says("Hello, world."))


async def test_a_chat_stream_equals_the_whole_answer(cluster: Cluster) -> None:
    cluster.says("Grüße €5 — done")
    chunks = [
        chunk
        async for chunk in await cluster.openai.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Grüße €5 — done"
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks if chunk.choices)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_ends_with_done_and_without_usage_by_default(cluster: Cluster) -> None:
    cluster.says("ok")
    reply = await cluster.http.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events[:-1])


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [70, 71, 72], [[70, 71, 72]]])
async def test_completion_takes_every_form_of_one_prompt(cluster: Cluster, prompt: Any) -> None:
    cluster.says("fine")
    answer = await cluster.openai.completions.create(model=MODEL, prompt=prompt)
    assert answer.choices[0].text == "fine"
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        [work] = cluster.decode.works.values()
        assert list(work.prompt) == [70, 71, 72]


async def test_stop_string_across_tokens_ends_the_text_before_it(cluster: Cluster) -> None:
    cluster.says("one two STOP three")
    answer = await cluster.openai.completions.create(model=MODEL, prompt="Hi", stop=["STOP", "\n"])
    assert answer.choices[0].text == "one two "
    assert answer.choices[0].finish_reason == "stop"
    stream = await cluster.openai.completions.create(model=MODEL, prompt="Hi", stop="STOP", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two "
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_stop_string_that_never_completes_is_text(cluster: Cluster) -> None:
    cluster.says("one two STO")
    answer = await cluster.openai.completions.create(model=MODEL, prompt="Hi", stop=["STOP"])
    assert answer.choices[0].text == "one two STO"


async def test_eos_ends_the_answer_without_text_unless_ignored(cluster: Cluster) -> None:
    tokens = cluster.says("ab")
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: [*tokens, 2, *tokens]
    answer = await cluster.openai.completions.create(model=MODEL, prompt="Hi")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    answer = await cluster.openai.completions.create(model=MODEL, prompt="Hi", extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abab", "length")


async def test_chat_logprobs(cluster: Cluster) -> None:
    cluster.says("abc")
    answer = await cluster.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == "abc"
    assert b"".join(bytes(each.bytes) for each in content) == b"abc"
    assert all(each.logprob == -0.5 and len(each.top_logprobs) == 2 for each in content)
    without = await cluster.openai.chat.completions.create(**CHAT)
    assert without.choices[0].logprobs is None


async def test_completion_logprobs(cluster: Cluster) -> None:
    cluster.says("xyz")
    answer = await cluster.openai.completions.create(model=MODEL, prompt="Hi", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == "xyz"
    assert logprobs.text_offset[0] == 0
    assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens)
    assert all(len(top) == 1 for top in logprobs.top_logprobs)


async def test_sampling_reaches_the_workers_resolved(cluster: Cluster) -> None:
    await cluster.openai.completions.create(
        model=MODEL,
        prompt="Hi",
        temperature=0.5,
        top_p=0.5,
        seed=7,
        max_tokens=5,
        presence_penalty=0.5,
        frequency_penalty=-2,
        logit_bias={"9": -100, "70": 1.5},
        extra_body={"top_k": 3, "min_p": 0.25, "stop_token_ids": [9], "repetition_penalty": 1.5},
    )
    [work] = cluster.decode.works.values()
    sampling = work.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.5, 0.25)
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (3, 7, 5)
    assert list(sampling.stop_token_ids) == [2, 9]
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -2, 1.5)
    assert dict(sampling.logit_bias) == {9: -100, 70: 1.5}
    [same] = cluster.prefill.works.values()
    assert same.sampling == sampling


async def test_the_user_names_the_session_in_every_api(cluster: Cluster) -> None:
    """Requests of one session prefer the same workers: test_core_placement.py."""
    sessions: list[bytes | None] = []
    cluster.app.dispatcher.core.facts.subscribe(Arrived, "test", lambda run, *_: sessions.append(run.request.session))
    for user in ("one", "two"):
        await cluster.openai.completions.create(**COMPLETION, user=user)
        await cluster.openai.chat.completions.create(**CHAT, user=user)
        await cluster.openai.responses.create(model=MODEL, input="Hi", user=user)
        assert [event async for event in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi", user=user))]
    await cluster.openai.completions.create(**COMPLETION)
    assert sessions == [sessions[0]] * 4 + [sessions[4]] * 4 + [None]
    assert sessions[0] != sessions[4]


async def test_a_prompt_cache_key_names_the_session_before_the_user(cluster: Cluster) -> None:
    sessions: list[bytes | None] = []
    cluster.app.dispatcher.core.facts.subscribe(Arrived, "test", lambda run, *_: sessions.append(run.request.session))
    await cluster.openai.completions.create(**COMPLETION, user="one")
    for key, user in (("one", None), ("one", "two")):
        fields = {"prompt_cache_key": key, "user": user}
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            assert (await cluster.http.post(f"/v1/{path}", json=body | fields)).status_code == 200
        reply = await cluster.http.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | fields)
        assert reply.status_code == 200
    assert sessions == [sessions[0]] * 7


async def test_defaults_are_a_drawn_seed_and_openais_numbers_of_tokens(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.openai.completions.create(model=MODEL, prompt=[70] * 12)
    first, second = (work.sampling for work in cluster.decode.works.values())
    assert first.seed != second.seed
    assert first.max_tokens == 16
    await cluster.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    last = [*cluster.decode.works.values()][-1]
    assert last.sampling.max_tokens == 512 - len(last.prompt), "the context that is left"


async def test_values_that_change_nothing_are_taken(cluster: Cluster) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    more = {
        "messages": [{"role": "user", "content": [part], "id": "m1"}],
        "top_k": -1,
        "verbosity": "low",
        "prompt_cache_retention": "24h",
        "add_generation_prompt": True,
        "skip_special_tokens": True,
        "length_penalty": 1.0,
        "use_beam_search": False,
    }
    reply = await cluster.http.post("/v1/chat/completions", json={"model": MODEL} | more)
    assert reply.status_code == 200, reply.text
    assert [*cluster.decode.works.values()][-1].sampling.top_k == 0
    for field, value in (("use_beam_search", True), ("skip_special_tokens", False), ("length_penalty", 2.0)):
        reply = await cluster.http.post("/v1/chat/completions", json={"model": MODEL} | more | {field: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_usage_comes_in_every_event_if_asked_for(cluster: Cluster) -> None:
    tokens = cluster.says("abcdef")
    options = {"continuous_usage_stats": True, "include_usage": True}
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "a"}),
    ):
        extra = {"model": MODEL, "stream": True, "stream_options": options, "max_tokens": 6}
        reply = await cluster.http.post(f"/v1/{path}", json=body | extra)
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == len(tokens)
        assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


async def test_max_tokens_beyond_the_context_is_refused_with_the_limits(cluster: Cluster) -> None:
    await cluster.openai.completions.create(model=MODEL, prompt=[70] * 12, max_tokens=500)
    [work] = cluster.decode.works.values()
    assert work.sampling.max_tokens == 500
    with pytest.raises(openai.BadRequestError) as refused:
        await cluster.openai.completions.create(model=MODEL, prompt=[70] * 12, max_tokens=501)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    for part in ("maximum context length is 512 tokens", "prompt has 12", "got 501", "at most 500"):
        assert part in refused.value.message
    for limit in ({"max_tokens": 9999}, {"max_completion_tokens": 9999}):
        with pytest.raises(openai.BadRequestError, match="got 9999"):
            await cluster.openai.chat.completions.create(**CHAT, **limit)


async def test_fields_without_effect_are_accepted(cluster: Cluster) -> None:
    answer = await cluster.openai.chat.completions.create(
        **CHAT,
        n=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[],
        response_format={"type": "text"},
        frequency_penalty=0,
        modalities=["text"],
        max_completion_tokens=3,
    )
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("chat/completions", {"functions": [{}]}, "functions"),
        ("chat/completions", {"audio": {}}, "audio"),
        ("chat/completions", {"modalities": ["audio"]}, "modalities"),
        ("chat/completions", {"web_search_options": {}}, "web_search_options"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"n": 2, "best_of": 3}, "best_of"),
        ("completions", {"suffix": "end"}, "suffix"),
    ],
)
async def test_unsupported_field_is_refused_by_name(
    cluster: Cluster, path: str, extra: dict[str, Any], param: str
) -> None:
    body = (CHAT if path.startswith("chat") else COMPLETION) | extra
    reply = await cluster.http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, "unsupported_parameter", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("chat/completions", {"frobnicate": 1}, "frobnicate"),
        ("completions", {"tools": []}, "tools"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("chat/completions", {"messages": [{"role": "pope", "content": "x"}]}, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages.0.y"),
        ("completions", {"temperature": 3}, "temperature"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"top_p": 0}, "top_p"),
        ("completions", {"frequency_penalty": 2.1}, "frequency_penalty"),
        ("completions", {"presence_penalty": -3}, "presence_penalty"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
        ("completions", {"logit_bias": {"5": 101}}, "logit_bias"),
        ("completions", {"logit_bias": {"320": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"٣": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": -1, "echo": True}, "max_tokens"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"n": 129}, "n"),
        ("completions", {"n": 10**30}, "n"),
        ("chat/completions", {"n": 129}, "n"),
        ("completions", {"n": 65, "prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": ["a"] * 129}, "prompt"),
        ("completions", {"prompt": ["a", ""]}, "prompt"),
        ("completions", {"prompt": [[70], []]}, "prompt"),
        ("completions", {"prompt": [[70], [-1]]}, "prompt"),
        ("completions", {"max_tokens": True}, "max_tokens"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"stop": ["a"] * 17}, "stop"),
        ("completions", {"stop": [""]}, "stop"),
        ("completions", {"stop_token_ids": [100000]}, "stop_token_ids"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": [100000]}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
async def test_bad_field_is_refused_by_name(cluster: Cluster, path: str, extra: dict[str, Any], param: str) -> None:
    body = (CHAT if path.startswith("chat") else COMPLETION) | extra
    reply = await cluster.http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_missing_field_is_named(cluster: Cluster) -> None:
    reply = await cluster.http.post("/v1/completions", json={"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"[" * 30000, b"null"],
    ids=["empty", "cut", "array", "bad utf-8", "lone surrogate", "deep", "null"],
)
async def test_body_that_is_no_request_is_refused(cluster: Cluster, body: bytes) -> None:
    reply = await cluster.http.post("/v1/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "n", "best_of", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "prompt", "priority",
    "max_completion_tokens", "max_output_tokens",
)  # fmt: skip


async def test_numbers_of_any_size_are_refused_by_field_in_every_api(cluster: Cluster) -> None:
    """JSON's integers have no limit; those of 4,300 digits and more are refused by the parser."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        for name in (*NUMBERS, *(["tokens"] if path == "/detokenize" else [])):
            for number in (10**30, -(10**400), 10**4000, 10**5000):
                digits = f"{'-' if number < 0 else ''}1{'0' * (len(hex(abs(number))) * 4 // 10)}"
                for value in (digits, f"[{digits}]", f'{{"1": {digits}}}'):
                    text = json.dumps({"model": "tiny", **body, name: "?"}).replace('"?"', value)
                    reply = await cluster.http.post(path, content=text.encode())
                    assert reply.status_code == 400, (path, name, value[:20], reply.text)
                    assert len(reply.content) < 1000


async def test_body_over_the_limit_is_refused(cluster: Cluster) -> None:
    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 1024

    for content in (b"x" * 70000, chunks()):
        reply = await cluster.http.post("/v1/completions", content=content)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "payload_too_large"


async def test_the_error_of_an_unknown_model_lists_the_served_ones(cluster: Cluster) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'") as caught:
        await cluster.openai.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert (await cluster.http.get("/v1/models/gpt-9")).status_code == 404


@pytest.mark.parametrize("prompt", [[70] * 512, [70] * 600, "x" * 60000])
async def test_prompt_beyond_the_context_is_refused_with_the_numbers(cluster: Cluster, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="512") as caught:
        await cluster.openai.completions.create(model=MODEL, prompt=prompt)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"


async def test_models_health_ready_and_metrics(cluster: Cluster) -> None:
    models = await cluster.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await cluster.openai.models.retrieve(MODEL)).id == MODEL
    assert (await cluster.http.get("/health")).status_code == 200
    assert (await cluster.http.get("/ready")).status_code == 200
    await cluster.openai.completions.create(model=MODEL, prompt="Hi")
    text = (await cluster.http.get("/metrics")).text
    assert 'tandem_requests_total{code="",model="tiny",state="finished"} 1.0' in text
    assert 'tandem_placements_total{model="tiny",reason="handoff_configured"} 1.0' in text


async def test_not_ready_without_a_decode_worker(bare: Cluster) -> None:
    assert (await bare.http.get("/health")).status_code == 200
    assert (await bare.http.get("/ready")).status_code == 503


async def test_wrong_path_and_method_answer_with_an_error_object(cluster: Cluster) -> None:
    assert (await cluster.http.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await cluster.http.get("/v1/completions")).status_code == 405


async def test_min_tokens_reaches_the_workers_within_its_bounds(cluster: Cluster) -> None:
    await cluster.openai.completions.create(model=MODEL, prompt="a", max_tokens=5, extra_body={"min_tokens": 5})
    [work] = cluster.decode.works.values()
    assert work.sampling.min_tokens == 5
    for wrong in ({"min_tokens": 6}, {"min_tokens": -1}, {"min_tokens": 1, "response_format": {"type": "json_object"}}):
        reply = await cluster.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 5} | wrong
        )
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "min_tokens")
