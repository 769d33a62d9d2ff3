"""Adapters with vLLM's engines: each answers as the model with the adapter's weights added."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import yaml

from cluster.control.controller import Controller
from cluster.testing.running import ON_FREE_PORTS, running
from tandem.errors import CheckpointError, ConfigError
from tandem.request import SamplingParams
from tandem.testing.adapters import write_adapter, write_merged
from tandem.testing.engine import EngineDriver, make_request, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tests.vllm.conftest import VOCAB

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # one cluster serves all
    pytest.mark.filterwarnings("default"),  # those of vLLM's own modules
]
NAMES = [f"adapter-{number}" for number in range(20)]
TOKENS = 16
PROMPTS = [random_prompt(20 + 45 * number, VOCAB, number) for number in range(3)]
LONG_S = 120.0


@dataclass
class Site:
    folder: Path
    model_dir: Path
    controller: Controller
    source: dict[str, Any]
    references: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    async def apply(self) -> tuple[str, ...]:
        return await self.controller.applier.apply(yaml.safe_dump(self.source), dry_run=False)

    async def ask(self, model: str, prompt: list[int], tokens: int = TOKENS) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were cached."""
        async with openai.AsyncOpenAI(
            base_url=f"http://{self.controller.http_address}/v1", api_key="none", max_retries=0, timeout=LONG_S
        ) as client:
            done = await client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=0.0)
        assert done.model == model
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        return done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens or 0

    async def answers(self, model: str) -> list[str]:
        return [text for text, _ in await asyncio.gather(*(self.ask(model, prompt) for prompt in PROMPTS))]

    def expected(self, model: str, seed: int = 0) -> list[str]:
        """By our own engine, with the adapter's matrices added to the weights."""
        if (model, seed) not in self.references:
            folder = self.model_dir
            if model != "tiny":
                folder = write_merged(self.folder / f"merged-{model}-{seed}", folder, self.folder / model)
            rank = single_rank(folder, self.folder / "rendezvous", block_tokens=32)
            driver, tokenizer = EngineDriver(rank.engine), Tokenizer.load(folder)
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
            for number, prompt in enumerate(PROMPTS):
                rank.engine.add(make_request(str(number), prompt, sampling))
            driver.run()
            self.references[model, seed] = [
                tokenizer.decode(driver.tokens[str(number)], skip_special_tokens=True) for number in range(len(PROMPTS))
            ]
            rank.close()
        return self.references[model, seed]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("a")
    model = write_tiny_llama(folder / "tiny", vocab=VOCAB, head_dim=32, scale=2.0)
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, model, seed=seed, rank=1 + seed % 16)
    engine = {"kind": "vllm", "block_tokens": 32, "kv_blocks": 96, "max_model_tokens": 512, "max_step_tokens": 64}
    source = {
        "models": [
            {
                "source": str(model),
                "engine": engine | {"vllm": {"max_loras": 3, "max_cpu_loras": 6}},  # fewer than there are
                "decode": {"tp": 2},
                "adapters": [{"name": name, "source": str(folder / name)} for name in NAMES],
            }
        ],
        "router": ON_FREE_PORTS["router"] | {"disaggregation": "always"},
        "control": ON_FREE_PORTS["control"],
    }
    async with running(source, folder) as controller:
        yield Site(folder, model, controller, source)


async def test_twenty_adapters_answer_at_once_each_with_its_own_weights(site: Site) -> None:
    names = ["tiny", *NAMES]
    found = await asyncio.gather(*(site.answers(name) for name in names))
    expected = [site.expected(name) for name in names]
    assert len({tuple(each) for each in expected}) == len(names), "no two adapters answer alike"
    assert dict(zip(names, found, strict=True)) == dict(zip(names, expected, strict=True))


async def test_an_adapter_gets_room_though_others_are_asked_for_without_a_pause(site: Site) -> None:
    """Three run at once. Each of these always has an answer that runs, so none makes room by itself."""
    asking = [
        asyncio.create_task(answers_until_stopped(site, name, tokens=100 + 7 * number))
        for name in NAMES[:3]
        for number in range(3)
    ]
    await asyncio.sleep(2.0)
    async with asyncio.timeout(LONG_S):
        found = await site.answers(NAMES[9])
    assert not any(task.done() for task in asking)
    for task in asking:
        task.cancel()
    assert found == site.expected(NAMES[9])


async def test_cached_blocks_are_of_one_adapter(site: Site) -> None:
    prompt = random_prompt(150, VOCAB, 77)
    for name in NAMES[:2]:
        first, again = await site.ask(name, prompt), await site.ask(name, prompt)
        assert first[1] == 0, "another adapter's blocks were found"
        assert again == (first[0], 128)


async def test_an_adapter_replaced_under_its_name_answers_with_its_new_weights(site: Site) -> None:
    name, kept = NAMES[3], NAMES[4]
    prompt = PROMPTS[-1]
    await site.ask(kept, prompt)
    before = await site.answers(name)
    assert before == site.expected(name)
    write_adapter(site.folder / name, site.model_dir, seed=99)
    assert await site.answers(name) == before, "what was applied is served"
    asking = asyncio.create_task(answers_until_stopped(site, name))
    assert await site.apply() == (f"tiny: adapters: {name} replaced",)
    expected = site.expected(name, 99)
    assert expected != before
    async with asyncio.timeout(LONG_S):
        while (found := await site.answers(name)) != expected:
            assert found == before, "an answer of neither"
    asking.cancel()
    (seen,) = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(seen, asyncio.CancelledError)
    assert (await site.ask(kept, prompt))[1] > 0, "others keep their blocks"


async def answers_until_stopped(site: Site, name: str, tokens: int = TOKENS) -> None:
    """Raises the first error of a client."""
    while True:
        await site.ask(name, PROMPTS[0], tokens)


async def test_adapters_are_added_and_removed_while_others_answer(site: Site) -> None:
    adapters = site.source["models"][0]["adapters"]
    write_adapter(site.folder / "late", site.model_dir, seed=50)
    adapters.append({"name": "late", "source": str(site.folder / "late")})
    removed = adapters.pop(0)
    asking = asyncio.create_task(answers_until_stopped(site, NAMES[5]))
    assert await site.apply() == (f"tiny: adapters: late added; {removed['name']} removed",)
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                assert await site.answers("late") == site.expected("late")
                break
            except openai.NotFoundError:  # the router has not heard of it yet
                await asyncio.sleep(0.05)
    with pytest.raises(openai.NotFoundError, match=f"got '{removed['name']}'"):
        await site.ask(removed["name"], PROMPTS[0])
    assert not asking.done()
    asking.cancel()


async def test_a_worker_whose_second_rank_died_comes_back_with_its_adapters(site: Site) -> None:
    slot = site.controller.workers.slots["decode-0"]
    epoch, name = slot.epoch, NAMES[7]
    rank = next(each.pid for each in await slot.processes() if each.name == "rank-1")
    asked = [asyncio.create_task(site.ask(name, PROMPTS[-1], 300)) for _ in range(2)]
    async with asyncio.timeout(LONG_S):
        while not (state := await site.controller.workers.state(slot)) or not state.load.running_requests:
            await asyncio.sleep(0.02)
        os.kill(rank, signal.SIGKILL)
        first, second = await asyncio.gather(*asked)
        assert first[0] == second[0]
        assert first[0].startswith(site.expected(name)[-1])
        assert slot.epoch != epoch
        assert await site.answers(NAMES[8]) == site.expected(NAMES[8])


async def test_adapters_that_do_not_fit_are_refused_by_name_and_change_nothing(site: Site) -> None:
    adapters = site.source["models"][0]["adapters"]
    write_adapter(site.folder / "wide", site.model_dir, rank=17)
    adapters.append({"name": "wide", "source": str(site.folder / "wide")})
    with pytest.raises(CheckpointError, match=r"wide: expected a rank of at most 16, got 17: set engine\.vllm"):
        await site.apply()
    adapters.pop()
    write_adapter(site.folder / "pissa", site.model_dir, config={"init_lora_weights": "pissa"})
    adapters.append({"name": "pissa", "source": str(site.folder / "pissa")})
    with pytest.raises(ConfigError, match=r"adapters: pissa: \w+-0 cannot load it: .*vLLM cannot load it: .*pissa"):
        await site.apply()
    adapters.pop()
    assert await site.answers(NAMES[6]) == site.expected(NAMES[6])
