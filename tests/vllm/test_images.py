"""Images with vLLM's engines: a pair answers as vLLM alone does, and images are never mixed up."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from cluster.control.controller import Controller
from cluster.testing.running import ON_FREE_PORTS, running
from tandem.text.chat_template import ChatTemplate
from tandem.text.special_texts import encode_marked
from tandem.text.tokenizer import Tokenizer
from tests.vllm.vllms_models import BLOCK_TOKENS, CONTEXT, alone, blank, picture, write_image_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # one cluster serves all
    pytest.mark.filterwarnings("default"),  # those of vLLM's own modules
]
TOKENS = 12
LONG_S = 120.0
Part = str | bytes


def url(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": url(each)}}
        for each in parts
    ]


# One image, in the middle, at the end and twice; two; three of other shapes, over several blocks and steps.
CHATS: list[list[Part]] = [
    [picture(1), "what is this"],
    [picture(2), "what is this"],
    ["before", picture(1, kind="JPEG"), " and after"],
    ["the same twice", picture(3), picture(3)],
    [picture(1), " or ", picture(2, 20, 90), "?"],
    ["a long text before " * 6, picture(4, 90, 20), "between " * 9, picture(5), picture(6, 64, 64), "after"],
    ["no image at all"],
]


@dataclass
class Site:
    folder: Path
    model_dir: Path
    controller: Controller

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://{self.controller.http_address}/v1", api_key="none", max_retries=0, timeout=LONG_S
        )

    async def ask(self, parts: Sequence[Part], tokens: int = TOKENS) -> Any:
        async with self.client() as client:
            return await client.chat.completions.create(
                model="images",
                messages=[{"role": "user", "content": content(parts)}],  # type: ignore[misc, list-item]
                max_tokens=tokens,
                temperature=0.0,
                extra_body={"ignore_eos": True},
            )

    async def expected(self, chats: Sequence[Sequence[Part]], tokens: int = TOKENS) -> list[str]:
        """The texts that vLLM alone answers."""
        template, tokenizer = ChatTemplate.load(self.model_dir), Tokenizer.load(self.model_dir)
        assert template is not None
        asked = []
        for parts in chats:
            given = [{"type": "image"} if isinstance(each, bytes) else {"type": "text", "text": each} for each in parts]
            prompt = encode_marked(tokenizer, template.render([{"role": "user", "content": given}]))
            images = [base64.b64encode(each).decode() for each in parts if isinstance(each, bytes)]
            asked.append({"prompt": prompt, "images": images, "tokens": tokens})
        answers = await alone(self.model_dir, asked)
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("i")
    model = write_image_model(folder / "images")
    engine = {
        "kind": "vllm",
        "block_tokens": BLOCK_TOKENS,
        "kv_blocks": 96,
        "max_model_tokens": CONTEXT,
        "max_step_tokens": 64,  # less than some prompts have: images come in one step, and begin in another
    }
    source = {
        "models": [{"source": str(model), "engine": engine, "decode": {"tp": 2}}],
        "router": ON_FREE_PORTS["router"] | {"disaggregation": "always"},
        "control": ON_FREE_PORTS["control"],
    }
    async with running(source, folder) as controller:
        yield Site(folder, model, controller)


async def test_a_pair_answers_as_vllm_alone_does(site: Site) -> None:
    expected = await site.expected(CHATS)
    assert len(set(expected)) == len(CHATS)
    found = await asyncio.gather(*(site.ask(parts) for parts in CHATS))
    assert [each.choices[0].message.content for each in found] == expected
    assert [each.usage.prompt_tokens for each in found][-1] < 60


async def test_kv_of_an_image_is_found_again_and_never_anothers(site: Site) -> None:
    """The first image's KV is found in the turn after it; with another image in its place only what is before it."""
    before = "a text of more than one block, which all of these requests begin with: "
    parts: list[Part] = [before, picture(11), "what is this, and what do you think of it?"]
    first = await site.ask(parts)
    assert cached(first) == 0
    assert cached(await site.ask(parts)) >= 96
    other = await site.ask([before, picture(12), "what is this, and what do you think of it?"])
    assert 64 <= cached(other) < 96
    both = await site.expected([parts, [before, picture(12), *parts[2:]]])
    assert [each.choices[0].message.content for each in (first, other)] == both


def cached(done: Any) -> int:
    return int(done.usage.prompt_tokens_details.cached_tokens or 0)


async def test_answers_with_and_without_images_share_a_batch(site: Site) -> None:
    chats: list[list[Part]] = [
        [picture(number), f"number {number}"] if number % 3 else [f"number {number}"] for number in range(18)
    ]
    found = await asyncio.gather(*(site.ask(parts) for parts in chats))
    assert [each.choices[0].message.content for each in found] == await site.expected(chats)


async def test_preempted_answers_read_their_images_again(site: Site) -> None:
    """There are blocks for about half of them. What was imported is computed by the decode worker's two ranks."""
    chats: list[list[Part]] = [[picture(number), f"number {number}"] for number in range(18)]
    found = await asyncio.gather(*(site.ask(parts, 300) for parts in chats))
    assert [each.choices[0].message.content for each in found] == await site.expected(chats, 300)
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://{site.controller.http_address}/metrics")).text
    counted = [line for line in metrics.splitlines() if line.startswith("tandem_worker_preemptions_total")]
    assert sum(float(line.split()[-1]) for line in counted if "decode-0" in line) > 0


async def test_a_worker_that_dies_loses_no_answer(site: Site) -> None:
    """A single decode worker: its requests wait for its next life, to which their images are sent again."""
    chats: list[list[Part]] = [[picture(40 + number), f"number {number}"] for number in range(8)]
    slot = site.controller.workers.slots["decode-0"]
    rank, epoch = next(each.pid for each in await slot.processes() if each.name == "rank-0"), slot.epoch
    many = [asyncio.create_task(site.ask(parts, 200)) for parts in chats]
    async with asyncio.timeout(LONG_S):
        while not (state := await site.controller.workers.state(slot)) or not state.load.running_requests:
            await asyncio.sleep(0.02)
        os.kill(rank, signal.SIGKILL)
        found = await asyncio.gather(*many)
    assert slot.epoch != epoch
    assert [each.choices[0].message.content for each in found] == await site.expected(chats, 200)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([b"\x89PNG\r\n\x1a\n and no more"], "messages: expected images that can be read"),
        ([picture(1)[:200]], "messages: expected images that can be read"),
        ([picture(1)] * 15, "This model's maximum context length is 512 tokens"),
        ([blank(3000, 3000)] * 6, "messages: expected at most 50000000 pixels in all images of a request"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(site: Site, parts: list[Part], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        await site.ask(parts)
    assert (await site.ask(["and text goes on"])).choices[0].message.content == (
        await site.expected([["and text goes on"]])
    )[0]
