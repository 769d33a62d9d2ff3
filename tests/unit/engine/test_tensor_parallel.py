"""Several ranks, each its own process, answer as one does; and none outlives its leader."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tandem.config.spec import EngineSpec
from tandem.engine.factory import build_rank
from tandem.engine.step import HEARTBEAT
from tandem.engine.tp_group import TpGroup
from tandem.errors import ConfigError, WorkerLost
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, NoExport, make_request
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference

VOCAB = 300
SPEC = EngineSpec(kv_blocks=64, max_step_tokens=48)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=8)

FOLLOW = """
import sys
from pathlib import Path
from tandem.config.spec import EngineSpec
from tandem.engine.factory import build_rank
from tandem.testing.engine import NoExport

model_dir, rendezvous, rank, size, spec = sys.argv[1:]
build_rank(
    Path(model_dir),
    EngineSpec.model_validate_json(spec),
    rank=int(rank),
    size=int(size),
    rendezvous_file=Path(rendezvous),
    exporter=NoExport(),
).follow()
"""

LEAD_ONCE_AND_DIE = """
import os, sys
from pathlib import Path
import torch
from tandem.engine.step import HEARTBEAT
from tandem.engine.tp_group import TpGroup

TpGroup(Path(sys.argv[1]), 0, 2, torch.device("cpu")).send_step(HEARTBEAT)
os._exit(9)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


@contextmanager
def followers(
    model_dir: Path, rendezvous: Path, size: int, spec: EngineSpec = SPEC
) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [start(FOLLOW, model_dir, rendezvous, rank, size, spec.model_dump_json()) for rank in range(1, size)]
    try:
        yield started
    finally:
        for process in started:
            with process:
                process.kill()


@pytest.mark.parametrize(
    ("tp", "kv_heads"),
    [
        (2, 4),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.soak_only),
        pytest.param(4, 2, marks=pytest.mark.soak_only),
    ],
)
def test_ranks_together_equal_the_reference(
    tmp_path: Path, reference_for: Callable[[Path], Reference], tp: int, kv_heads: int
) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, heads=8, kv_heads=kv_heads, head_dim=8, seed=2)
    rendezvous = tmp_path / "rendezvous"
    with followers(model_dir, rendezvous, tp) as started:
        leader = build_rank(model_dir, SPEC, rank=0, size=tp, rendezvous_file=rendezvous, exporter=NoExport())
        driver = EngineDriver(leader.engine)
        expected = {}
        for length, sampling in ((1, GREEDY), (17, SEEDED), (100, GREEDY), (100, SEEDED)):
            name, prompt = f"{length} {sampling.temperature}", random_prompt(length, VOCAB)
            expected[name] = reference_for(model_dir).answer(prompt, sampling)
            driver.add(name, prompt, replace(sampling, prompt_logprobs=1))
        driver.run()
        leader.engine.idle_tick()
        leader.engine.close()
        assert driver.tokens == expected
        prompt = random_prompt(100, VOCAB)
        own = reference_for(model_dir).logprobs(prompt).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        for name in ("100 0.0", "100 0.7"):
            assert [each.logprob for each in driver.scores[name]] == pytest.approx(own.tolist(), abs=1e-4)
        assert driver.at_rest()
        assert leader.layout.kv_heads == max(1, kv_heads // tp)
        assert [process.wait(120) for process in started] == [0] * (tp - 1)


@pytest.mark.slow
def test_every_rank_keeps_its_part_of_evicted_blocks(
    tmp_path: Path, reference_for: Callable[[Path], Reference]
) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, heads=4, kv_heads=2, head_dim=8, seed=2)
    spec = EngineSpec(kv_blocks=12, max_step_tokens=48, host_kv_memory_bytes=1 << 20)
    prompts = {str(seed): random_prompt(70, VOCAB, seed) for seed in range(5)}
    expected = {name: reference_for(model_dir).answer(prompt, GREEDY) for name, prompt in prompts.items()}
    with followers(model_dir, tmp_path / "r", 2, spec) as started:
        leader = build_rank(model_dir, spec, rank=0, size=2, rendezvous_file=tmp_path / "r", exporter=NoExport())
        driver = EngineDriver(leader.engine)
        for _ in range(2):
            driver.tokens.clear()
            for name, prompt in prompts.items():
                driver.add(name, prompt, GREEDY)
                driver.run()
            assert driver.tokens == expected
        assert driver.cached == dict.fromkeys(prompts, 64)
        reserved = driver.engine.reserve(make_request("r", prompts["0"], GREEDY))  # copies without a forward pass
        assert reserved.cached_tokens == 64
        driver.engine.cancel("r")
        driver.tokens.clear()
        driver.add("0", prompts["0"], GREEDY)
        driver.run()
        assert driver.tokens["0"] == expected["0"]
        leader.engine.close()
        assert [process.wait(120) for process in started] == [0]


def test_ranks_wait_for_each_other(tmp_path: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        device = torch.device("cpu")
        leader, follower = pool.map(lambda rank: TpGroup(tmp_path / "r", rank, 2, device), range(2))

        def come_late() -> None:
            time.sleep(0.2)
            said.append("late")
            follower.barrier()

        late = pool.submit(come_late)
        leader.barrier()
        assert said == ["late"]
        late.result()


def test_a_follower_ends_when_its_leader_dies(tmp_path: Path) -> None:
    with start(LEAD_ONCE_AND_DIE, tmp_path / "rendezvous") as leader:
        steps = TpGroup(tmp_path / "rendezvous", 1, 2, torch.device("cpu")).steps()
        assert next(steps) == HEARTBEAT
        assert leader.wait(120) == 9
        with pytest.raises(WorkerLost):
            next(steps)


def test_a_follower_gives_up_a_leader_that_falls_silent(tmp_path: Path) -> None:
    with start(LEAD_ONCE_AND_DIE.replace("os._exit(9)", "sys.stdin.read()"), tmp_path / "rendezvous") as silent:
        try:
            group = TpGroup(tmp_path / "rendezvous", 1, 2, torch.device("cpu"), idle_timeout=timedelta(seconds=0.3))
            steps = group.steps()
            assert next(steps) == HEARTBEAT
            with pytest.raises(WorkerLost):
                next(steps)
        finally:
            silent.kill()


def test_only_the_leader_has_an_engine_and_only_followers_follow(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB)
    rank = build_rank(model_dir, SPEC, rank=0, size=1, rendezvous_file=tmp_path / "r", exporter=NoExport())
    with pytest.raises(ConfigError, match="no leader to follow"):
        rank.follow()


def test_a_width_that_does_not_fit_the_model_is_refused_with_those_that_do(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, heads=4, kv_heads=2)
    with pytest.raises(ConfigError, match="1, 2, 4"):
        build_rank(model_dir, SPEC, rank=0, size=3, rendezvous_file=tmp_path / "r", exporter=NoExport())
