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

from tandem.config.engine import EngineSpec
from tandem.engine.factory import build_rank
from tandem.engine.step import HEARTBEAT
from tandem.engine.tp_group import TpGroup
from tandem.errors import ConfigError, WorkerLost
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, NoExport, make_request
from tandem.testing.models import random_prompt, write_tiny_eagle, write_tiny_llama
from tests.conftest import Reference
from tests.unit.engine.test_drafts import write_medusa

VOCAB = 300
SPEC = EngineSpec(kv_blocks=64, max_step_tokens=48)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=8)

FOLLOW = """
import sys
from pathlib import Path
from tandem.config.engine import EngineSpec
from tandem.engine.factory import build_rank
from tandem.testing.engine import NoExport

model_dir, rendezvous, rank, size, spec = sys.argv[1:]
rank = build_rank(
    Path(model_dir),
    EngineSpec.model_validate_json(spec),
    rank=int(rank),
    size=int(size),
    rendezvous_file=Path(rendezvous),
    exporter=NoExport(),
)
rank.follow()
rank.close()
"""

# A rank, the leader too, that fails for steps with token 299: in the second layer, so after collectives.
POISONED = """
import torch
from tandem.engine.runner import ModelRunner

launch, layer_done = ModelRunner.launch, ModelRunner._layer_done

def noted(self, step):
    self.poisoned = any(299 in each.token_ids for each in step.sequences)
    return launch(self, step)

def failing(self, reported, layer):
    if self.poisoned and layer == LAYER:
        raise IndexError("no row for this token")
    layer_done(self, reported, layer)

ModelRunner.launch, ModelRunner._layer_done = noted, failing
"""
LEAD = """
from tandem.errors import TandemError
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
driver = EngineDriver(rank.engine)
driver.add("well", list(range(20)), GREEDY)
driver.take(rank.engine.step())
for name in ("poisoned", "twice"):
    driver.add(name, [5, 299, len(name)], GREEDY)
driver.run()
for number in range(3):
    driver.add(f"alone {number}", [5, 299, number], GREEDY)
    driver.run()
driver.add("later", list(range(30)), GREEDY)
driver.run()
print(*(name for name, end in driver.ends.items() if isinstance(end, TandemError)), sep=",")
print(*driver.tokens["well"], *driver.tokens["later"])
rank.close()
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


def start(script: str, *arguments: object, stdout: int | None = None) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=stdout)


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


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param({"speculation": "early_exit", "speculation_layers": 1}, marks=pytest.mark.slow),
        pytest.param({"speculation": "draft", "speculation_weights": "int8"}, marks=pytest.mark.slow),
        {"speculation": "draft", "speculation_model": "other"},
        {"speculation": "eagle3", "speculation_model": "head"},
        {"speculation": "medusa", "speculation_model": "medusa", "speculation_branches": 4},
    ],
    ids=["first layer", "itself in int8", "another model", "eagle3", "trees"],
)
def test_ranks_draft_alike(
    tmp_path: Path, reference_for: Callable[[Path], Reference], drafts: dict[str, object]
) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, heads=8, kv_heads=4, head_dim=8, seed=2)
    write_tiny_llama(tmp_path / "other", vocab=VOCAB, seed=3, layers=1)
    write_tiny_eagle(tmp_path / "head", model_dir)
    write_medusa(tmp_path / "medusa", shared=False)
    if "speculation_model" in drafts:
        drafts = drafts | {"speculation_model": str(tmp_path / str(drafts["speculation_model"]))}
    spec = EngineSpec.model_validate(SPEC.model_dump() | drafts | {"speculation_adaptive": False})
    with followers(model_dir, tmp_path / "rendezvous", 2, spec) as started:
        leader = build_rank(
            model_dir, spec, rank=0, size=2, rendezvous_file=tmp_path / "rendezvous", exporter=NoExport()
        )
        driver, expected = EngineDriver(leader.engine), {}
        for length, sampling in ((1, GREEDY), (17, SEEDED), (100, GREEDY), (100, SEEDED)):
            name, prompt = f"{length} {sampling.temperature}", random_prompt(length, VOCAB)
            expected[name] = reference_for(model_dir).answer(prompt, sampling)
            driver.add(name, prompt, sampling)
        driver.run()
        leader.engine.close()
        assert driver.tokens == expected
        assert driver.at_rest()
        assert leader.engine.speculator is not None
        assert leader.engine.speculator.proposed > 5
        assert [process.wait(120) for process in started] == [0]


def ranks_with_poison(model_dir: Path, rendezvous: Path, layers: tuple[int, int]) -> tuple[str, list[int]]:
    """What a leader printed that fails in the first of `layers`, beside a follower that does in the second; and their
    exit codes."""
    of_rank = (FOLLOW.replace("rank.follow()\nrank.close()\n", "") + LEAD, FOLLOW)
    started = [
        start(
            POISONED.replace("LAYER", str(layer)) + script, model_dir, rendezvous, rank, 2, SPEC.model_dump_json(),
            stdout=subprocess.PIPE,
        )
        for rank, (layer, script) in enumerate(zip(layers, of_rank, strict=True))
    ]  # fmt: skip
    try:
        printed, _ = started[0].communicate(timeout=120)
        return printed.decode(), [process.wait(120) for process in started]
    finally:
        for process in started:
            with process:
                process.kill()


def test_a_request_that_fails_all_ranks_ends_alone(tmp_path: Path, reference_for: Callable[[Path], Reference]) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=2)
    printed, codes = ranks_with_poison(model_dir, tmp_path / "rendezvous", (1, 1))
    answers = [reference_for(model_dir).answer(list(range(length)), GREEDY) for length in (20, 30)]
    assert printed.splitlines() == [
        "poisoned,twice,alone 0,alone 1,alone 2",
        " ".join(str(token) for answer in answers for token in answer),
    ]
    assert codes == [0, 0]


@pytest.mark.slow
def test_ranks_that_fail_at_different_places_end(tmp_path: Path) -> None:
    """They cannot use their collectives again."""
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, seed=2)
    printed, codes = ranks_with_poison(model_dir, tmp_path / "rendezvous", (0, 1))
    assert not printed
    assert 0 not in codes


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
            group = TpGroup(tmp_path / "rendezvous", 1, 2, torch.device("cpu"))
            steps = group.steps()
            assert next(steps) == HEARTBEAT
            group._idle_timeout = timedelta(seconds=0.3)  # not while the leader sends
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
