"""Two tenants with API keys ask the same prompts of live workers: neither ever meets the other's cached blocks, and
times to first token do not tell whether the other has asked before."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from router.auth import api_keys
from router.auth.keys_file import change_keys
from tandem.config.auth import AuthSpec
from tandem.config.engine import EngineSpec
from tandem.testing.models import random_prompt, write_tiny_llama

FULL_ROUNDS, SHORT_ROUNDS, CONTROL_ROUNDS = 500, 30, 300
VOCAB = 300
PROMPT_TOKENS = 304
WARM_UP = 5
# Of samples that do not differ one in twenty has p < 0.05. A leak is many orders of magnitude below (the control).
SUSPICIOUS = 0.05
CERTAIN = 1e-3


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    cached_tokens: int


def mann_whitney_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the rank-sum test (normal approximation; times do not tie)."""
    count_1, count_2 = len(first), len(second)
    ranks = np.argsort(np.argsort(np.concatenate([first, second]))) + 1.0
    rank_sum = float(ranks[:count_1].sum())
    mean = count_1 * (count_1 + count_2 + 1) / 2
    deviation = math.sqrt(count_1 * count_2 * (count_1 + count_2 + 1) / 12)
    return math.erfc(abs(rank_sum - mean) / deviation / math.sqrt(2))


def test_the_statistics_tell_a_shift_from_none() -> None:
    dice = np.random.default_rng(1)
    same, also, later = dice.normal(10, 1, 300), dice.normal(10, 1, 300), dice.normal(10.5, 1, 300)
    assert mann_whitney_p(list(same), list(also)) > SUSPICIOUS
    assert mann_whitney_p(list(same), list(later)) < CERTAIN
    # Computed by hand: U = 0 of 3 and 3.
    assert mann_whitney_p([1, 2, 3], [4, 5, 6]) == pytest.approx(0.0495, abs=1e-4)


async def ask(http: httpx.AsyncClient, key: str, prompt: list[int]) -> Answer:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began_s, first_s, usage = time.perf_counter(), None, None
    async with http.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            first_s = first_s or time.perf_counter()
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    assert first_s is not None
    assert usage is not None
    return Answer(first_s - began_s, usage["prompt_tokens_details"]["cached_tokens"])


def two_keys(folder: Path) -> tuple[Path, str, str]:
    path, texts = folder / "keys.yaml", []
    for tenant in ("victim", "curious"):
        new = api_keys.create(tenant, datetime.now(UTC))
        change_keys(path, lambda keys, new=new: keys.with_key(new.record))  # type: ignore[misc]
        texts.append(new.text)
    return path, texts[0], texts[1]


async def ask_in_turn(
    http: httpx.AsyncClient, rounds: int, first: str, second: str, seed: int
) -> tuple[list[Answer], list[Answer]]:
    """Each round has a prompt of its own: the first key's holder asks it, then the second's. As turns alternate,
    whatever else the machine does meets both alike."""
    answers: tuple[list[Answer], list[Answer]] = ([], [])
    for number in range(-WARM_UP, rounds):
        prompt = random_prompt(PROMPT_TOKENS, VOCAB, seed + number)
        asked = await ask(http, first, prompt), await ask(http, second, prompt)
        if number >= 0:
            for told, answer in zip(answers, asked, strict=True):
                told.append(answer)
    return answers


def compared(name: str, first: list[Answer], second: list[Answer]) -> float:
    """p of their times to first token."""
    times = [[each.ttft_s for each in told] for told in (first, second)]
    p = mann_whitney_p(*times)
    medians = " and ".join(f"{1000 * float(np.median(told)):.2f} ms" for told in times)
    print(f"{name}: {len(first)} TTFTs each, medians {medians}, p = {p:.2g}")
    return p


async def rounds_that_show_a_hit(http: httpx.AsyncClient, key: str) -> int:
    """The control: rounds it takes on this machine, as busy as it is, until times show that one tenant asks again."""
    fresh: list[Answer] = []
    again: list[Answer] = []
    while len(fresh) < CONTROL_ROUNDS:
        for told, answers in zip(
            (fresh, again), await ask_in_turn(http, SHORT_ROUNDS, key, key, 1_000_000 + len(fresh)), strict=True
        ):
            told.extend(answers)
        assert all(each.cached_tokens >= PROMPT_TOKENS // 16 * 16 - 16 for each in again)
        if compared("the same tenant again", fresh, again) < CERTAIN:
            return len(fresh)
    pytest.fail("these times would not show a hit")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.acceptance(41, here="30 pairs", soak="500 pairs")
async def test_times_do_not_tell_one_tenant_what_another_has_asked(
    tmp_path: Path, routed: Callable[..., AbstractAsyncContextManager[Any]]
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, hidden=128, layers=4, seed=1)
    path, victim, curious = two_keys(tmp_path)
    engine = EngineSpec(kv_blocks=400)
    async with routed(model, prefill=1, decode=1, engine=engine, auth=AuthSpec(keys_file=str(path))) as cluster:
        url = f"http://127.0.0.1:{cluster.app.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            rounds = await rounds_that_show_a_hit(http, victim)
            rounds = max(rounds, FULL_ROUNDS if os.environ.get("TANDEM_SOAK") else SHORT_ROUNDS)
            for attempt in (1, 2, 3):
                first, second = await ask_in_turn(http, rounds, victim, curious, 10_000 * attempt)
                assert {each.cached_tokens for each in [*first, *second]} == {0}
                if compared("another tenant", first, second) > SUSPICIOUS:
                    return
    pytest.fail("three times in a row the times differed")
