"""Simulated speculation: as many tokens as the chances say, each request whole, and the engine's own choice of how
many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cluster.cli.commands.planning.profile import measured_acceptance
from planner.acceptance import Acceptance, chance_of
from planner.cost import PrefillWork
from planner.fitted import read_acceptance
from planner.simulator.result import SimResult
from planner.simulator.setup import PoolSetup, Setup
from planner.simulator.simulate import simulate
from planner.traces.trace import TrafficTrace
from tandem.config.engine import EngineSpec
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import ConfigError
from tandem.testing.models import write_tiny_llama


@dataclass(frozen=True)
class RowCost:
    """A step takes 10 ms and `row_s` for each row."""

    row_s: float = 1e-5
    fit_error: float | None = None

    def prefill_s(self, tokens: int, context: int) -> float:
        return 1e-5 * tokens

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return 0.01 + self.row_s * batch if batch else 0.0

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        return sum(1e-5 * work.tokens for work in prefills) + self.decode_step_s(batch, context_tokens)

    def transfer_s(self, num_bytes: int) -> float:
        return num_bytes * 1e-9


def simulated(acceptance: Acceptance | None, *, cost: RowCost | None = None, requests: int = 30) -> SimResult:
    pool = PoolSetup(1, 1, cost or RowCost(), 100_000, acceptance=acceptance)
    setup = Setup(pool, replace(pool), 10, 8, 100_000, RouterSpec(disaggregation=Disaggregation.ALWAYS))
    arrivals, lengths = np.arange(requests, dtype=np.float64) * 4.0, np.full(requests, 200)
    trace = TrafficTrace("alone", arrivals, lengths.astype(np.int64), lengths.astype(np.int64))
    return simulate(trace, setup)


def tpot_s(result: SimResult) -> float:
    assert result.tpot_s.mean is not None
    return result.tpot_s.mean


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8])
def test_tokens_come_as_much_faster_as_the_chances_say(chance: float) -> None:
    plain, ours = simulated(None), simulated(Acceptance(chance, tokens=4))
    assert plain.finished == ours.finished == 30
    expected = sum(chance**count for count in range(5))
    assert tpot_s(plain) / tpot_s(ours) == pytest.approx(expected, rel=0.12)
    assert tpot_s(simulated(Acceptance(chance, tokens=4))) == tpot_s(ours)


def test_nothing_is_proposed_where_rows_cost_as_much_as_steps() -> None:
    costly = RowCost(row_s=0.01)
    plain, ours = (tpot_s(simulated(each, cost=costly)) for each in (None, Acceptance(0.5)))
    assert ours == pytest.approx(plain, rel=0.05)


def test_drafts_take_their_share() -> None:
    free, drafted = (tpot_s(simulated(Acceptance(0.7, 4, share))) for share in (0.0, 0.1))
    assert drafted > 1.1 * free


@pytest.mark.parametrize("text", ["", "1", "-0.1", "0.5:0", "0.5:65", "0.5:4:2", "0.5:4:0.1:3", "nan", "a:b"])
def test_what_no_speculation_is_like_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--acceptance: expected CHANCE\[:TOKENS"):
        Acceptance.parse(text)
    assert Acceptance.parse("0.7:4:0.1") == Acceptance(0.7, 4, 0.1)
    assert Acceptance.parse("0.7") == Acceptance(0.7, 8, 0.0)


def test_a_profile_says_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"acceptance": {"chance": 0.7, "tokens": 8, "draft_share": 0.1}}))
    assert read_acceptance(path) == Acceptance(0.7, 8, 0.1)
    path.write_text("{}")
    assert read_acceptance(path) is None
    for wrong in ({"chance": 2.0}, {"chance": "x"}, {"luck": 1}, [0.7]):
        path.write_text(json.dumps({"acceptance": wrong}))
        with pytest.raises(ConfigError, match="acceptance: expected chance, tokens and draft_share"):
            read_acceptance(path)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_chance_is_found_from_the_tokens_of_a_step(chance: float) -> None:
    assert chance_of(Acceptance(chance, 8).most_per_step, 8) == pytest.approx(chance, abs=1e-6)
    assert chance_of(1.0, 8) == pytest.approx(0.0, abs=1e-6)


def test_costly_drafts_of_little_luck_are_left_out() -> None:
    plain, ours = (tpot_s(simulated(each)) for each in (None, Acceptance(0.3, 4, 0.9)))
    assert ours == pytest.approx(plain, rel=0.03)


def test_a_model_says_what_its_speculation_gives(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", vocab=320, seed=1)
    engine = EngineSpec(kv_blocks=1000, speculation="draft", speculation_weights="int8")
    said: list[str] = []
    found = measured_acceptance(engine, model, said.append, tokens=200)
    assert found is not None
    assert found.chance > 0.5
    assert found.draft_share > 0
    (model / "tokenizer_config.json").unlink()
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert measured_acceptance(engine, model, said.append, tokens=200) is None
    assert "no chat template" in said[-1]
