"""Constrained answers with vLLM's engines: those of our own engine, token for token, whichever workers give them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.requests.raw_request import RawRequest, RawSampling
from router.service import RouterService
from tandem.grammar.constraint import json_schema
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.text.tokenizer import Tokenizer
from tests.integration.conftest import StartRouted
from tests.vllm.conftest import ENGINE, VOCAB

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules
EOS = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "notes": {
            "type": "array",
            "items": {"type": "string", "minLength": 5, "maxLength": 8},
            "minItems": 2,
            "maxItems": 3,
        },
        "kind": {"enum": ["capital", "village"]},
    },
    "required": ["id", "notes", "kind"],
    "additionalProperties": False,
}
CONSTRAINT = json_schema(SCHEMA, "response_format")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 200}
PROMPTS = [random_prompt(20 + 31 * number, VOCAB, number) for number in range(6)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny", vocab=VOCAB, head_dim=32, seed=1, eos_token_id=EOS
    )


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """By our engine."""
    driver = EngineDriver(single_rank(tiny, tmp_path_factory.mktemp("alone") / "rendezvous", kv_blocks=200).engine)
    sampling = SamplingParams.parse(seed=0, **GREEDY, stop_token_ids=frozenset({EOS}), grammar=CONSTRAINT.grammar)
    for number, prompt in enumerate(PROMPTS):
        driver.add(str(number), prompt, sampling)
    driver.run()
    return [driver.tokens[str(number)] for number in range(len(PROMPTS))]


async def answered(service: RouterService, prompt: list[int], **sampling: Any) -> tuple[list[int], str]:
    tokens: list[int] = []
    submitted = await service.submit(RawRequest("tiny", tuple(prompt), RawSampling(**sampling)))
    async for pieces in submitted.stream:
        tokens += [token.token_id for piece in pieces for token in piece.tokens]
    assert submitted.stream.final is not None
    return tokens, submitted.stream.final.reason


@pytest.mark.parametrize("decode_tp", [1, 2])
async def test_constrained_answers_are_those_of_our_own_engine(
    routed: StartRouted, tiny: Path, expected: list[list[int]], decode_tp: int
) -> None:
    """Beside others that are free, and some whose tokens are drawn."""
    tokenizer = Tokenizer.load(tiny)
    async with routed(tiny, prefill=1, decode=1, decode_tp=decode_tp, engine=ENGINE) as live:
        service = live.app.service
        free = [asyncio.create_task(answered(service, prompt, **GREEDY)) for prompt in PROMPTS[:2]]
        drawn = [
            asyncio.create_task(answered(service, prompt, **SEEDED, constraint=CONSTRAINT)) for prompt in PROMPTS[2:4]
        ]
        found = await asyncio.gather(
            *(answered(service, prompt, **GREEDY, constraint=CONSTRAINT) for prompt in PROMPTS)
        )
        assert [tokens for tokens, _ in found] == expected
        for tokens, reason in [*found, *await asyncio.gather(*drawn)]:
            assert reason == "stop"
            jsonschema.validate(json.loads(tokenizer.decode(tokens, skip_special_tokens=True)), SCHEMA)
        await asyncio.gather(*free)


async def test_a_grammar_that_fails_ends_its_own_request_alone(routed: StartRouted, tiny: Path) -> None:
    """Routers check grammars, so a worker meets one that fails only from a faulty router."""
    async with routed(tiny, prefill=1, decode=1, engine=ENGINE) as live:
        service = live.app.service
        model = service.models.by_name["tiny"]
        parsed = await model.parse(RawRequest("tiny", tuple(PROMPTS[0]), RawSampling(**GREEDY)), service.threads)
        object.__setattr__(parsed.sampling, "grammar", "no grammar at all")
        failing = service.dispatcher.submit(model, parsed)
        beside = asyncio.create_task(answered(service, PROMPTS[1], **GREEDY))
        with pytest.raises(Exception, match="grammar: "):
            async for _ in failing:
                pass
        assert (await beside)[0]
