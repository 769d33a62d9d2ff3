"""Images through the whole of a cluster, with an engine whose answers show which image it read."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from cluster.testing.small_rank import __name__ as SMALL_RANK
from router.edge.openai.request_schema import ChatCompletionRequest
from router.requests import image_expansion
from router.requests.deaths import MAX_DEATHS
from router.requests.image_expansion import EACH, SHARE_OF_ONE
from router.testing.stub_worker import until
from tandem.config.model import Role
from tandem.config.router import Disaggregation, RouterSpec
from tandem.images import ExpandedPrompt, PromptImage
from tandem.testing.models import SPECIAL_TOKENS, write_tiny_llama
from tandem.testing.small_engine import VOCAB, SmallEngine, answer_of
from tandem.text.chat_template import ChatTemplate
from tandem.text.special_texts import SpecialTexts, encode_marked
from tandem.text.tokenizer import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc
from tests.integration.conftest import Routed, StartRouted

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|endoftext|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
CAT, DOG = b"\x89PNG\r\n\x1a\n cat cat cat", b"\xff\xd8\xff a dog, which is larger"
TOKENS = 12
ROOMY = RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, max_body_bytes=16 << 20)
Part = str | bytes


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": data_url(each)}}
        for each in parts
    ]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


class Asking:
    def __init__(self, live: Routed, http: httpx.AsyncClient, model_dir: Path) -> None:
        self.live, self.http = live, http
        template = ChatTemplate.load(model_dir)
        assert template is not None
        self._template, self._tokenizer = template, Tokenizer.load(model_dir)

    async def chat(self, *parts: Part, **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content(parts)}]
        body = {"model": "tiny", "messages": messages, "max_tokens": TOKENS}
        return await self.http.post("/v1/chat/completions", json=body | {"temperature": 0} | more)

    async def text(self, *parts: Part) -> str:
        reply = await self.chat(*parts)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def prompt(self, *parts: Part) -> ExpandedPrompt:
        shown = [{"type": "image"} if isinstance(each, bytes) else {"type": "text", "text": each} for each in parts]
        written = SpecialTexts(SPECIAL_TOKENS).mark(shown)
        tokens = encode_marked(self._tokenizer, self._template.render([{"role": "user", "content": written}]))
        return SmallEngine(1).expand(tokens, [each for each in parts if isinstance(each, bytes)], b"")

    def expected(self, *parts: Part) -> str:
        prompt = self.prompt(*parts)
        files = [each for each in parts if isinstance(each, bytes)]
        images = [PromptImage.of(*span, data) for span, data in zip(prompt.spans, files, strict=True)]
        tokens = answer_of(prompt.tokens, TOKENS, images=images)
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture
def asking(routed: StartRouted, model_dir: Path) -> Any:
    @asynccontextmanager
    async def start(prefill: int = 1, decode: int = 1, **more: Any) -> AsyncIterator[Asking]:
        more = {"rank_module": SMALL_RANK} | more
        async with (
            routed(model_dir, prefill=prefill, decode=decode, **more) as live,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.app.http_port}", timeout=60.0) as http,
        ):
            yield Asking(live, http, model_dir)

    return start


async def test_answers_are_of_the_images_and_their_places(asking: Any) -> None:
    chats: list[list[Part]] = [
        [CAT, "what is it"],
        [DOG, "what is it"],
        ["what is it", CAT],
        [CAT, "or", DOG],
        [DOG, "or", CAT],
        [CAT, CAT],
        ["<|endoftext|> is text"],
    ]
    async with asking(prefill=2, decode=2) as asked:
        found = await asyncio.gather(*(asked.text(*parts) for parts in chats))
        assert found == [asked.expected(*parts) for parts in chats]
        assert len(set(found)) == len(chats)
        usage = (await asked.chat(CAT, DOG)).json()["usage"]
        assert usage["prompt_tokens"] == len(asked.prompt(CAT, DOG).tokens)


async def test_every_api_takes_images(asking: Any) -> None:
    async with asking() as asked:
        expected, size = asked.expected("see", CAT), len(asked.prompt("see", CAT).tokens)
        (card,) = (await asked.http.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text", "image"]
        given: list[dict[str, Any]] = [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"},
        ]
        body = {"model": "tiny", "temperature": 0}
        reply = await asked.http.post(
            "/v1/responses",
            json=body | {"input": [{"role": "user", "content": given}], "max_output_tokens": TOKENS},
        )
        assert reply.json()["output"][0]["content"][0]["text"] == expected, reply.text
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
        given = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
        messages = {"model": "tiny", "messages": [{"role": "user", "content": given}]}
        reply = await asked.http.post("/v1/messages", json=messages | {"temperature": 0, "max_tokens": TOKENS})
        assert reply.json()["content"][0]["text"] == expected, reply.text
        reply = await asked.http.post("/v1/messages/count_tokens", json=messages)
        assert reply.json() == {"input_tokens": size}
        asked_of = [{"role": "user", "content": content(["see", CAT])}]
        reply = await asked.http.post("/tokenize", json={"messages": asked_of})
        assert tuple(reply.json()["tokens"]) == asked.prompt("see", CAT).tokens
        message = pb.ChatMessage(role="user", parts=[pb.ContentPart(text="see"), pb.ContentPart(image=CAT)])
        request = pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[message]), sampling=pb.SamplingParams(temperature=0, max_tokens=TOKENS)
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{asked.live.app.grpc_port}") as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            text = "".join([each.chunk.text async for each in stub.Generate(request)])
        assert text == expected


async def test_the_chat_command_sends_images_with_the_first_question(asking: Any, tmp_path: Path) -> None:
    picture, missing = tmp_path / "cat.png", tmp_path / "none.png"
    picture.write_bytes(CAT)
    async with asking() as asked:
        address = f"127.0.0.1:{asked.live.app.grpc_port}"

        async def chat(*arguments: str) -> tuple[int | None, str, str]:
            command = [sys.executable, "-m", "cluster", "chat", "--address", address, "--temperature", "0", *arguments]
            process = await asyncio.create_subprocess_exec(
                *command, "--max-tokens", str(TOKENS), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            said, errors = await process.communicate()
            return process.returncode, said.decode(), errors.decode()

        code, said, errors = await chat("--image", str(picture), "--image", str(picture), "see")
        assert code == 0, errors
        assert said.rstrip("\n") == asked.expected(CAT, CAT, "see").rstrip("\n")
        code, _, errors = await chat("--image", str(missing), "see")
        assert (code, "--image" in errors, "expected a file" in errors) == (2, True, True), errors


async def test_an_answer_is_whole_though_its_decode_worker_is_killed(asking: Any) -> None:
    """The image goes to the next worker too."""
    async with asking(decode=2) as asked:
        rank = asked.live.workers.live["decode-0"].ranks[0]
        rank.send_signal(signal.SIGSTOP)  # or it could end all that it has before it is killed
        workers = asked.live.app.dispatcher.fleet.workers()
        decode = next(worker for worker in workers if worker.key.worker_id == "decode-0")
        many = [asyncio.create_task(asked.text(CAT, "what is it", str(number))) for number in range(40)]
        await until(lambda: decode.account.requests > 0)
        rank.kill()
        assert await asyncio.gather(*many) == [asked.expected(CAT, "what is it", str(n)) for n in range(40)]
        assert "tandem_retries_total{" in asked.live.app.metrics.render().decode()
        await asked.live.workers.restart("decode-0")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([b"BM not one of those"], "messages.0.content.0.image_url.url: expected an image in PNG, JPEG, WebP or GIF"),
        ([CAT] * 17, "messages: expected at most 16, got 17"),
        ([b"GIF89a" + bytes(600), "x"], "This model's maximum context length is 512 tokens"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(asking: Any, parts: list[Part], said: str) -> None:
    async with asking() as asked:
        reply = await asked.chat(*parts)
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (400, True), reply.text
        assert await asked.text("and text goes on") == asked.expected("and text goes on")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/cat.png", "expected a data URL: the server fetches nothing"),
        ("file:///etc/passwd", "expected a data URL: the server fetches nothing"),
        ("data:image/png,plain", "expected a data URL such as data:image/png;base64,..."),
        ("data:image/png;base64,???", "expected base64, got other text"),
    ],
)
async def test_only_data_urls_are_taken(url: str, said: str) -> None:
    given = [{"type": "image_url", "image_url": {"url": url}}]
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": given}]})
    with pytest.raises(Exception, match=said):
        request.parse()


async def test_a_model_of_text_refuses_images(asking: Any) -> None:
    own = "cluster.backends.rank_process"
    async with asking(rank_module=own) as asked:
        reply = await asked.chat(CAT)
        said = "messages: expected text alone: no engine of tiny takes images"
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, said)
        assert (await asked.chat("text")).status_code == 200
        (card,) = (await asked.http.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text"]


async def test_images_of_all_requests_have_a_limit(asking: Any) -> None:
    """Of 64 largest bodies."""
    router = RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, max_body_bytes=1024)
    async with asking(router=router) as asked:
        app = asked.live.app
        app.service._images._room_bytes = SHARE_OF_ONE * len(CAT)
        assert await asked.text(CAT) == asked.expected(CAT)
        reply = await asked.chat(DOG)
        assert reply.status_code == 429, reply.text
        assert "messages: the images of the requests of one tenant here take" in reply.json()["error"]["message"]


async def test_images_count_for_each_choice(asking: Any) -> None:
    async with asking(router=ROOMY) as asked:
        large = b"GIF89a" + bytes(3 << 20)
        reply = await asked.chat(large, n=11)
        said = "messages: expected at most 32 MiB of images, for all choices together"
        assert (reply.status_code, said in reply.json()["error"]["message"]) == (400, True), reply.text


async def test_what_is_wrong_beside_an_image_is_refused_before_a_worker_reads_it(asking: Any) -> None:
    async with asking() as asked:
        expander, expanded = asked.live.app.service._images, list[str]()
        ask = expander.expand

        async def counted(*given: Any) -> ExpandedPrompt:
            expanded.append("")
            found: ExpandedPrompt = await ask(*given)
            return found

        expander.expand = counted
        for wrong in ({"temperature": 9}, {"max_tokens": 10_000}, {"stop": ["x" * 300]}):
            assert (await asked.chat(CAT, **wrong)).status_code == 400
        assert expanded == []
        assert (await asked.chat(CAT)).status_code == 200
        assert expanded == [""]


def reading(asked: Asking) -> int:
    """Requests whose images workers have."""
    slots = asked.live.app.service._images._slots
    return slots["tiny"].busy if slots else 0


@contextmanager
def nothing_read(asked: Asking) -> Iterator[None]:
    rank = asked.live.workers.live["prefill-0"].ranks[0]
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(rank.pid, signal.SIGCONT)


async def test_a_deadline_holds_while_images_are_read_and_a_late_answer_is_dropped(asking: Any) -> None:
    async with asking() as asked:
        expander = asked.live.app.service._images
        with nothing_read(asked):
            body = {"model": "tiny", "messages": [{"role": "user", "content": content([CAT])}]}
            late = await asked.http.post("/v1/chat/completions", json=body, headers={"x-request-timeout-s": "0.3"})
            assert late.status_code == 504, late.text
        assert await asked.text(CAT) == asked.expected(CAT)
        await until(lambda: reading(asked) == 0)
        assert not expander._parsed_bytes


async def test_a_client_that_leaves_frees_its_place_before_its_image_is_read(asking: Any) -> None:
    async with asking() as asked:
        expander = asked.live.app.service._images
        with nothing_read(asked):
            left = [asyncio.create_task(asked.chat(CAT)) for _ in range(EACH)]
            await until(lambda: reading(asked) == EACH)
            for each in left:
                each.cancel()
            await until(lambda: not expander._parsed_bytes)
        assert await asked.text(CAT) == asked.expected(CAT)


async def test_images_that_two_workers_died_of_are_read_by_no_third(asking: Any) -> None:
    async with asking() as asked:
        fleet = asked.live.app.dispatcher.fleet
        for _ in range(MAX_DEATHS):
            await until(lambda: fleet.ready("tiny", Role.PREFILL))
            rank = asked.live.workers.live["prefill-0"].ranks[0]
            rank.send_signal(signal.SIGSTOP)
            asked_for = asyncio.create_task(asked.chat(CAT))
            await until(lambda: any(each.link.expanding for each in fleet.ready("tiny", Role.PREFILL)))
            rank.kill()
            assert (await asked_for).status_code == 503
            await asked.live.workers.restart("prefill-0")
        refused = await asked.chat(CAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "request_quarantined"), refused.text
        assert await asked.text(DOG) == asked.expected(DOG)
        assert reading(asked) == 0


async def test_more_images_than_may_wait_for_workers_are_refused(asking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_expansion, "MAX_WAITING", SHARE_OF_ONE)
    async with asking() as asked:
        expander = asked.live.app.service._images
        with nothing_read(asked):
            first = [asyncio.create_task(asked.chat(CAT)) for _ in range(EACH + 1)]
            await until(lambda: "tiny" in expander._slots and expander._slots["tiny"].waiting == 1)
            refused = await asked.chat(CAT)
            assert refused.status_code == 429, refused.text
        assert {(await each).status_code for each in first} == {200}


async def test_all_text_is_shown_by_a_template_that_reads_parts_alone(asking: Any, model_dir: Path) -> None:
    """As SmolVLM's: of a content that is a text, it would show nothing."""
    parts_alone = (
        "{% for message in messages %}{{ message['role'] + ':' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<|endoftext|>{% endif %}"
        "{% endfor %}<|im_end|>{% endfor %}"
    )
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": parts_alone}))
    async with asking() as asked:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": content(["look", CAT])},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "what is it?"},
        ]
        reply = await asked.http.post("/tokenize", json={"messages": messages})
        text = Tokenizer.load(model_dir).decode(reply.json()["tokens"], skip_special_tokens=True)
        assert text == "system:be briefuser:lookassistant:yesuser:what is it?"
