"""Attention by block tables, and decode steps recorded over tensors that stay, give the tokens of the plain way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.checkpoint.model_config import ModelConfig
from tandem.config.engine import EngineSpec
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.engine.decode_graphs import batch_sizes
from tandem.engine.factory import Rank, build_rank
from tandem.engine.output import best_of, best_of_any, launched
from tandem.engine.step import SequenceStep, StepInput
from tandem.request import SamplingParams
from tandem.testing.engine import EagerRecorder, EngineDriver, NoExport, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import write_family

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12)
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=2, max_tokens=12)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records as a GPU does: torch's operations alone, with the addresses of their tensors, and none of the Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replays = 0
        self._lines: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._lines.append((func, args, kwargs or {}, out))
        return out

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        self._lines = []
        with self:
            work()
        lines, self._lines = self._lines, []

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, out in lines:
                for told, made in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                    if told.data_ptr() != made.data_ptr():
                        told.copy_(made)

        return replay


def _tensors(out: Any) -> list[torch.Tensor]:
    outs = out if isinstance(out, tuple | list) else [out]
    return [each for each in outs if isinstance(each, torch.Tensor)]


def answers(rank: Rank, requests: dict[str, tuple[list[int], SamplingParams]], late: int = 0) -> dict[str, list[int]]:
    """The last `late` requests come one by one while the others decode."""
    driver = EngineDriver(rank.engine)
    waiting = list(requests.items())
    for name, (prompt, sampling) in waiting[: len(waiting) - late]:
        driver.add(name, prompt, sampling)
    for name, (prompt, sampling) in waiting[len(waiting) - late :]:
        for _ in range(3):
            driver.take(driver.engine.step())
        driver.add(name, prompt, sampling)
    driver.run()
    assert driver.at_rest()
    return driver.tokens


def mixed(count: int, vocab: int = VOCAB) -> dict[str, tuple[list[int], SamplingParams]]:
    kinds = (GREEDY, replace(GREEDY, max_tokens=30), SEEDED, PENALISED, replace(SEEDED, max_tokens=5))
    return {str(n): (random_prompt(1 + 13 * n % 90, vocab, n), kinds[n % len(kinds)]) for n in range(count)}


@pytest.mark.slow
def test_blocks_read_in_place_are_answered_from_as_gathered_ones(family_dir: Path, tmp_path: Path) -> None:
    """Prompts shorter and longer than the windows, in chunks, decoded together."""
    config = ModelConfig.load(family_dir)
    if config.traits.attention_softcap is not None:
        pytest.skip("no paged kernel caps scores")
    gathered = single_rank(family_dir, tmp_path / "g", kernels="torch", max_step_tokens=48)
    in_place = single_rank(family_dir, tmp_path / "p", paged=PagedPath(plain_attention, None), max_step_tokens=48)
    recorded = single_rank(
        family_dir, tmp_path / "r", paged=PagedPath(plain_attention, EagerRecorder()), max_step_tokens=48
    )
    expected = answers(gathered, mixed(5, 320))
    assert answers(in_place, mixed(5, 320)) == expected
    assert answers(recorded, mixed(5, 320)) == expected


@pytest.mark.parametrize("count", [1, 3, 11])
def test_replayed_steps_give_the_tokens_of_launched_ones(model_dir: Path, tmp_path: Path, count: int) -> None:
    options: dict[str, Any] = {"max_running_requests": 11, "max_model_tokens": 200, "kernels": "torch"}
    launched = single_rank(model_dir, tmp_path / "l", paged=PagedPath(plain_attention, None), **options)
    tape = Tape()
    replayed = single_rank(model_dir, tmp_path / "r", paged=PagedPath(plain_attention, tape), **options)
    requests, late = mixed(count), count // 2
    assert answers(replayed, requests, late) == answers(launched, requests, late)
    assert tape.replays > 10


def test_replayed_steps_survive_blocks_that_windows_leave_to_others(tmp_path: Path) -> None:
    mistral = write_family(tmp_path / "mistral", "mistral")
    requests = {str(n): (random_prompt(60, 320, n), replace(GREEDY, max_tokens=90)) for n in range(6)}
    expected = answers(single_rank(mistral, tmp_path / "l", kernels="torch", kv_blocks=128), requests)
    tape = Tape()
    small = single_rank(
        mistral, tmp_path / "r", paged=PagedPath(plain_attention, tape),
        kv_blocks=24, max_step_tokens=64, max_running_requests=6, max_model_tokens=160, kernels="torch",
    )  # fmt: skip
    assert answers(small, requests) == expected
    assert tape.replays > 50


def test_replayed_steps_survive_preemption(model_dir: Path, tmp_path: Path) -> None:
    requests = {str(n): (random_prompt(30, VOCAB, n), replace(GREEDY, max_tokens=40)) for n in range(6)}
    expected = answers(single_rank(model_dir, tmp_path / "l", kernels="torch"), requests)
    tape = Tape()
    small = single_rank(
        model_dir, tmp_path / "r", paged=PagedPath(plain_attention, tape),
        kv_blocks=12, max_step_tokens=64, max_model_tokens=160, kernels="torch",
    )  # fmt: skip
    assert answers(small, requests) == expected
    assert small.engine.preemptions
    assert tape.replays > 50


def test_empty_slots_write_to_the_spare_block_alone(model_dir: Path, tmp_path: Path) -> None:
    rank = single_rank(model_dir, tmp_path / "r", paged=PagedPath(plain_attention, EagerRecorder()), kv_blocks=16)
    rank.pool.tensor.fill_(7.0)
    answers(rank, {str(n): (random_prompt(20, VOCAB, n), GREEDY) for n in range(3)})
    touched = [block for block in range(16) if not (rank.pool.tensor[block] == 7.0).all()]
    assert len(touched) == 3 * 2
    assert rank.pool.with_spare.shape[0] == 17
    assert rank.pool.with_spare[16].any()


@dataclass
class Twins:
    """Recorded steps, and the reference over an equal pool: requests 0 to 9, each with its own random blocks."""

    recorded: Rank
    plain: Rank

    def difference(self, numbers: list[int], computed: list[int]) -> float:
        """Runs one step of these requests, of which `computed` tokens are in the pool."""
        sequences = [
            SequenceStep([1 + number], start, [*range(12 * number, 12 * number + start // 16 + 1)], 1)
            for number, start in zip(numbers, computed, strict=True)
        ]
        assert self.recorded.runner.graphs is not None
        ours, *_ = self.recorded.runner.graphs.run(sequences)
        theirs = self.plain.runner.launch(StepInput(sequences, []))
        assert theirs is not None
        expected = torch.from_numpy(np.stack([row for row in theirs.wait().logits if row is not None]))
        return float((ours - expected).abs().max())


@pytest.fixture
def twins(model_dir: Path, tmp_path: Path) -> Twins:
    options: dict[str, Any] = {"kv_blocks": 120, "max_running_requests": 10, "max_model_tokens": 192}
    recorded = single_rank(model_dir, tmp_path / "r", paged=PagedPath(plain_attention, EagerRecorder()), **options)
    plain = single_rank(model_dir, tmp_path / "p", kernels="torch", **options)
    plain.pool.tensor.normal_(generator=torch.Generator().manual_seed(5))
    recorded.pool.tensor.copy_(plain.pool.tensor)
    return Twins(recorded, plain)


def test_a_batch_that_shrinks_and_grows_reads_its_own_blocks(twins: Twins) -> None:
    """While it is small, a request gets a new block, and the host buffer of that step has other requests' rows."""
    steps = [([1, 2, 3, 4], 100), ([5, 6, 7, 8], 100), ([5, 2, 3, 4], 100), ([5, 6, 7, 8], 100)]
    for numbers, computed in [*steps, ([5], 112)]:
        assert twins.difference(numbers, [computed] * len(numbers)) < 1e-4
    assert twins.difference([5, 6, 7, 8], [112, 100, 100, 100]) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_read_their_own_blocks(twins: Twins, seed: int) -> None:
    """Requests that leave and come back, change slots, grow by blocks and are computed again from fewer."""
    draw = random.Random(seed)
    computed = [draw.randrange(190) for _ in range(10)]
    order = [*range(10)]
    for _ in range(100):
        if draw.random() < 0.1:
            one, other = draw.sample(range(10), 2)
            order[one], order[other] = order[other], order[one]
        batch = order[: draw.randint(1, 10)]
        assert twins.difference(batch, [computed[number] for number in batch]) < 1e-4
        for number in batch:
            computed[number] = 40 if computed[number] == 190 or draw.random() < 0.02 else computed[number] + 1


def test_batch_sizes_reach_the_most_there_can_be_and_waste_little() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 4]
    assert batch_sizes(4) == [1, 2, 4]
    assert batch_sizes(5) == [1, 2, 4, 8]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


FOLLOW = """
import sys
from pathlib import Path
from tandem.config.engine import EngineSpec
from tandem.engine.factory import build_rank
from tandem.engine.attention.paged_check import plain_attention
from tandem.engine.attention.paged_kernels import PagedPath
from tandem.testing.engine import EagerRecorder, NoExport

model_dir, rendezvous, spec = sys.argv[1:]
build_rank(
    Path(model_dir), EngineSpec.model_validate_json(spec), rank=1, size=2, rendezvous_file=Path(rendezvous),
    exporter=NoExport(), paged=PagedPath(plain_attention, EagerRecorder()),
).follow()
"""


@pytest.mark.slow
def test_two_ranks_replay_together(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", vocab=VOCAB, heads=8, kv_heads=2, head_dim=8, seed=2)
    spec, rendezvous = EngineSpec(kv_blocks=64, max_running_requests=5), tmp_path / "rendezvous"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FOLLOW, str(model_dir), str(rendezvous), spec.model_dump_json()]
    follower = subprocess.Popen(command, env=environment)
    try:
        leader = build_rank(
            model_dir, spec, rank=0, size=2, rendezvous_file=rendezvous, exporter=NoExport(),
            paged=PagedPath(plain_attention, EagerRecorder()),
        )  # fmt: skip
        together = answers(leader, mixed(5), late=2)
        leader.engine.close()
        assert follower.wait(60) == 0
    finally:
        follower.kill()
        follower.wait()
    assert together == answers(single_rank(model_dir, tmp_path / "alone", kernels="torch"), mixed(5), late=2)


def test_the_best_token_is_found_and_what_is_no_number_is_none() -> None:
    logits = torch.zeros(6, 8)
    logits[0, [3, 5]] = 2.0
    logits[1, 7] = 1.0
    logits[2, 4] = torch.nan
    logits[3, 1] = torch.inf
    logits[4] = -torch.inf
    logits[5, 2] = 0.5
    greedy = [True, False, True, False, True, False]
    steps = [SequenceStep([1], 4, [0], 1, greedy=each) for each in greedy]
    steps.insert(2, SequenceStep([1, 2], 4, [0], 0))
    assert best_of(logits[:0]).shape == (0,)
    for best in (best_of(logits), best_of_any(logits, None)):
        output = launched(steps, logits, best, best, []).wait()
        assert output.tokens == [3, 7, None, None, None, 2]
        assert [row is None for row in output.logits] == greedy
        assert output.logits[5] is not None
        assert output.logits[5].tolist() == logits[5].tolist()
