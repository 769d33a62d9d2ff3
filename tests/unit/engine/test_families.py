"""Every family through the engine: aggregated, its blocks handed to another engine, and continued elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.request import SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.testing.engine import EngineDriver, make_request, single_rank
from tandem.testing.models import random_prompt
from tests.conftest import Reference

VOCAB = 320
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12)


class Exported:
    """Notes the ranges of a prompt's blocks as they are finished."""

    def __init__(self) -> None:
        self.ranges: list[ExportRange] = []

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self.ranges += ranges

    def layer_done(self, layer: int) -> None:
        """Blocks are copied at the end."""


def test_answers_in_a_batch_equal_the_reference(
    family_dir: Path, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    """Prompts shorter and longer than the windows, in chunks, decoded together."""
    driver = EngineDriver(single_rank(family_dir, tmp_path / "r", max_step_tokens=48).engine)
    expected = {}
    for length, sampling in ((5, GREEDY), (30, SEEDED), (100, GREEDY)):
        name, prompt = f"{length}", random_prompt(length, VOCAB)
        expected[name] = reference_for(family_dir).answer(prompt, sampling)
        driver.add(name, prompt, sampling)
    driver.run()
    assert driver.tokens == expected
    assert driver.at_rest()


def test_an_answer_begun_here_and_handed_over_equals_the_reference(
    family_dir: Path, reference_for: Callable[[Path], Reference], tmp_path: Path
) -> None:
    exported, prompt = Exported(), random_prompt(70, VOCAB)
    expected = reference_for(family_dir).answer(prompt, GREEDY)
    sender = single_rank(family_dir, tmp_path / "p", exported, max_step_tokens=48)
    receiver = single_rank(family_dir, tmp_path / "d")
    prefill, decode = EngineDriver(sender.engine), EngineDriver(receiver.engine)
    reservation = decode.engine.reserve(make_request("r", prompt, GREEDY))

    prefill.add("r", prompt, GREEDY, export_from_block=0)
    prefill.run()
    for each in exported.ranges:
        for logical, block in enumerate(each.block_ids, each.first_block):
            receiver.pool.tensor[reservation.block_ids[logical]] = sender.pool.tensor[block]
    prefill.engine.release_export("r")
    decode.engine.join("r", prefill.tokens["r"][0])
    decode.run()
    assert [*prefill.tokens["r"], *decode.tokens["r"]] == expected

    # And broken off in the middle, continued from what was said so far.
    rest = replace(GREEDY, max_tokens=GREEDY.max_tokens - 5)
    decode.add("rest", [*prompt, *expected[:5]], rest, answered_tokens=5)
    decode.run()
    assert decode.tokens["rest"] == expected[5:]
    assert prefill.at_rest()
    assert decode.at_rest()
