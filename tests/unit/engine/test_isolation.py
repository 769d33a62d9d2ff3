"""One bad request fails itself, and the leader and its followers agree on what a step is."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.engine import TandemEngine
from tandem.engine.output import Launched, best_of, launched
from tandem.engine.step import HEARTBEAT, STOP, SequenceStep, StepInput, decode_step, encode_step
from tandem.errors import InternalError, WorkerLost
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.host_tier import BlockCopies
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.scheduler.scheduler import Scheduler
from tandem.testing.engine import EngineDriver, make_request

VOCAB = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


class BrokenFor:
    """A model whose logits are no numbers for requests that start with token 13."""

    samples_on_device = False

    def can_be_ahead_of(self, step: StepInput) -> bool:
        return False

    def launch(self, step: StepInput) -> Launched:
        rows = [sequence for sequence in step.sequences if sequence.samples]
        logits = torch.zeros(len(rows), VOCAB)
        for row, sequence in zip(logits, rows, strict=True):
            row[5] = 1.0
            if sequence.token_ids[0] == 13:
                row.fill_(torch.nan)
        best = best_of(logits)
        return launched(step.sequences, logits, best, best, [])


def make_engine(told: list[StepInput] | None = None) -> TandemEngine:
    scheduler = Scheduler(
        BlockPool(8), block_tokens=16, max_running_requests=4, max_step_tokens=64, max_model_tokens=100
    )
    return TandemEngine(BrokenFor(), scheduler, VOCAB, told.append if told is not None else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_request_alone(temperature: float) -> None:
    driver = EngineDriver(make_engine())
    sampling = SamplingParams(temperature=temperature, top_k=1, max_tokens=3)
    driver.add("bad", [13, 1], sampling)
    driver.add("good", [1, 2], sampling)
    driver.run()
    assert isinstance(driver.ends["bad"], InternalError)
    assert driver.ends["good"] is FinishReason.LENGTH
    assert driver.tokens == {"good": [5, 5, 5]}
    assert driver.at_rest()


def test_blocks_of_a_request_that_fails_are_not_found_again() -> None:
    """Neither those of the failing step nor those of its earlier chunks, which may hold the fault."""
    engine = make_engine()
    driver = EngineDriver(engine)
    prompts = {"bad": [13] * 90, "good": [1] * 40}
    findable: set[bytes] = set()
    for name in ("good", "bad", "good again", "bad again"):
        driver.add(name, prompts[name.split()[0]], GREEDY)
        driver.run()
        for event in engine.take_cache_events():
            (findable.update if event.stored else findable.difference_update)(event.hashes)
        assert len(findable) == 2  # full blocks of the good one
    assert driver.cached == {"good": 0, "good again": 32}
    assert isinstance(driver.ends["bad again"], InternalError)
    assert driver.at_rest()


def test_an_answer_ends_where_the_context_does() -> None:
    driver = EngineDriver(make_engine())
    driver.add("r", [1] * 95, SamplingParams(temperature=0.0, max_tokens=50))
    driver.run()
    assert len(driver.tokens["r"]) == 5
    assert driver.ends["r"] is FinishReason.LENGTH


def test_followers_are_told_of_every_step_of_idleness_and_of_the_end() -> None:
    told: list[StepInput] = []
    engine = make_engine(told)
    engine.idle_tick()
    engine.add(make_request("r", [1, 2, 3], GREEDY))
    engine.step()
    engine.close()
    assert told[0] == HEARTBEAT
    assert told[1].sequences == [SequenceStep([1, 2, 3], 0, [0], 1, greedy=True)]
    assert told[2] == STOP


def test_closing_after_the_followers_are_gone_is_quiet() -> None:
    def gone(step: StepInput) -> None:
        raise WorkerLost("a rank is gone")

    scheduler = Scheduler(BlockPool(8), 16, 4, 64, 100)
    engine = TandemEngine(BrokenFor(), scheduler, VOCAB, gone)  # type: ignore[arg-type]
    with pytest.raises(WorkerLost):
        engine.idle_tick()
    engine.close()


def test_a_step_crosses_processes_unchanged() -> None:
    step = StepInput(
        [SequenceStep([1, 2], 14, [7, 3], 0), SequenceStep([9], 40, [1, 2, 4], 3)],
        [ExportRange("r", 2, (7, 3), 5, in_cache=True, is_last=False)],
    )
    copying = StepInput([], [], copies=BlockCopies([3], [0], [1, 2], [3, 4]))
    for each in (step, copying, HEARTBEAT, STOP):
        assert decode_step(encode_step(each)) == each
