"""A model's context: workers refuse longer prompts, answers end where it does, and simulations and plans say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.devices import find_device
from planner.hardware import Hardware, make_setup
from planner.models import find_model
from planner.search.analytic import Analysis, Limit
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.plan import SearchOptions, make_plan
from planner.simulator.setup import Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.context import check_context, within_context
from planner.traces.trace import TrafficTrace
from tandem.config.router import RouterSpec
from tandem.errors import InputError


def hardware() -> Hardware:
    return Hardware(find_model("llama-2-7b"), find_device("h100"))


def setup(max_model_tokens: int | None = None, prefill: int = 1) -> Setup:
    found = hardware()
    return make_setup(
        found, found.pool(prefill, 1) if prefill else None, found.pool(1, 1), router=RouterSpec(),
        max_running_requests=64, max_step_tokens=2048, block_tokens=16, max_model_tokens=max_model_tokens,
    )  # fmt: skip


def trace(*lengths: tuple[int, int]) -> TrafficTrace:
    prompts, outputs = np.array(lengths).T
    return TrafficTrace("docs.jsonl", np.arange(len(lengths)) / 4.0, prompts, outputs)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llama-2-70b", 4096),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8192),
        ("meta-llama/Llama-3.1-8B-Instruct", 131_072),
        ("meta-llama/Meta-Llama-3.1-70B", 131_072),
        ("llama-3-70b", 131_072),
        ("Qwen/Qwen2.5-7B-Instruct", 32_768),
    ],
)
def test_a_name_has_the_context_of_its_checkpoint(name: str, tokens: int) -> None:
    assert find_model(name).context_tokens == tokens


def test_an_engine_has_no_longer_context_than_its_model() -> None:
    assert [setup(each).max_model_tokens for each in (None, 1024, 1 << 20)] == [4096, 1024, 4096]


def test_prompts_beyond_the_context_are_refused_and_counted_in_a_note() -> None:
    found = simulate(trace((100, 9), (4096, 9), (9000, 9), (4000, 9)), setup())
    assert (found.finished, found.rejected + found.failed) == (2, 2)
    assert found.notes == ("2 of 4 prompts have 4,096 tokens or more, the whole context: workers refuse them",)


@pytest.mark.parametrize("prefill", [0, 1])
def test_answers_end_where_the_context_does(prefill: int) -> None:
    lengths = (4095, 9), (4000, 300), (4000, 96)
    found = simulate(trace(*lengths), setup(prefill=prefill))
    assert found.finished == 3
    assert found.notes == ("2 of 3 answers are cut off at the context of 4,096 tokens",)
    assert within_context(trace(*lengths), 4096).output_tokens.tolist() == [1, 96, 96]


def test_a_trace_within_the_context_stays_as_it_is() -> None:
    short = trace((100, 9), (200, 9))
    assert within_context(short, 4096) is short
    check_context(short, 4096)


def test_a_trace_of_which_all_is_too_long_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"docs\.jsonl: expected prompts of fewer than 4,096 tokens.*got at least 5,000"
    ):
        check_context(trace((9000, 9), (5000, 9)), 4096)


def test_more_long_prompts_than_may_miss_rule_every_layout_out() -> None:
    long = trace(*[(1000, 20)] * 45, *[(9000, 20)] * 15)
    goal = Goal(Slo(ttft_s=5.0), max_devices=2, step_tokens=(2048,))
    found = make_plan(long, hardware(), goal, SearchOptions(requests=60))
    assert found.miss is not None
    assert found.miss.limit == Limit.CONTEXT
    assert "beyond the model's context (limit: the requests that may miss) takes 5.00 times" in found.miss.explanation
    assert "15 of 60 prompts have 4,096 tokens or more" in found.traffic[-1]
    few = make_plan(long, hardware(), replace(goal, attainment=0.7), SearchOptions(requests=60))
    assert few.chosen is not None
    assert few.chosen.rejected == 15
    bounds = Analysis(long, hardware(), goal.slo, 0.7, 64).bounds(ClusterLayout(0, 1, 1, 1, 2048))
    assert bounds.use[Limit.CONTEXT] == pytest.approx(15 / 18)
