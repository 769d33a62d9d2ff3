"""The router's classes of a plan are those of its trace; values have them with the plan's objectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.classes import UNLABELLED, check_classes, classes_of
from planner.search.evaluate import Evaluator, Job
from planner.search.goal import Goal
from planner.search.layout import ClusterLayout
from planner.search.plan import SearchOptions, make_plan
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace
from tandem.config.router import ClassSpec
from tandem.errors import InputError

SLO = Slo(1.0, 0.04, (("long", Slo(30.0)), ("batch", Slo(None, 0.2))))


def labels(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "tenant") for name in names)


def trace(rate: float, *names: str) -> TrafficTrace:
    """Prompts of 3,000 tokens; each request has the next class."""
    count = 120
    label = (np.arange(count) % len(names)).astype(np.int32)
    lengths = np.full(count, 3000), np.full(count, 40)
    return TrafficTrace("t", np.arange(count) / rate, *lengths, labels=labels(*names), label=label)


def dumped(found: tuple[ClassSpec, ...]) -> list[dict[str, Any]]:
    return [each.model_dump(exclude_defaults=True) for each in found]


def test_requests_without_a_class_have_the_default_ones() -> None:
    assert dumped(classes_of(UNLABELLED, SLO, refuses=True)) == [
        {"name": "interactive", "ttft_slo_s": 1.0, "tpot_slo_s": 0.04},
        {"name": "batch", "queue_timeout_s": 600.0, "batch": True},
    ]
    assert dumped(classes_of(UNLABELLED, SLO, refuses=False)) == [
        {"name": "interactive"},
        {"name": "batch", "queue_timeout_s": 600.0, "batch": True},
    ]


def test_each_class_of_the_trace_has_its_own_objectives() -> None:
    assert dumped(classes_of(labels("long", "batch", "chat"), SLO, refuses=True)) == [
        {"name": "long", "ttft_slo_s": 30.0},
        {"name": "chat", "ttft_slo_s": 1.0, "tpot_slo_s": 0.04},
        {"name": "batch", "tpot_slo_s": 0.2, "queue_timeout_s": 600.0, "batch": True},
    ]
    assert [each.name for each in classes_of(labels("batch"), SLO, refuses=True)] == ["interactive", "batch"]


def test_the_class_of_requests_that_name_none_is_the_first() -> None:
    assert [each.name for each in classes_of(labels("long", "", "long"), SLO, refuses=True)] == [
        "interactive", "long", "batch",
    ]  # fmt: skip


def test_classes_that_no_router_has_are_the_first_in_simulations_and_refused_for_values() -> None:
    assert [each.name for each in classes_of(labels("Chat 1", "long"), SLO, refuses=False)] == [
        "interactive", "long", "batch",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"--values: expected classes.*got 'Chat 1': rename them"):
        check_classes(labels("long", "Chat 1"))
    with pytest.raises(InputError, match=r"expected at most 16 classes in the trace, as in router\.classes, got 17"):
        check_classes(labels(*(f"c{number}" for number in range(17))))
    check_classes(labels(*(f"c{number}" for number in range(16))))
    check_classes(UNLABELLED)


def test_a_plan_is_tried_with_routers_that_refuse_what_would_be_late() -> None:
    hardware = Hardware(find_model("llama-3-8b"), find_device("h100"))
    evaluator = Evaluator(trace(20.0, "chat", "long"), hardware, Slo(0.5, 0.1))
    job = Job(ClusterLayout(0, 1, 1, 1, 2048), 120)
    waiting, refusing = (evaluator.evaluate(replace(job, refuses=refuses)) for refuses in (False, True))
    assert waiting.rejected == 0
    assert refusing.rejected > 10
    found = make_plan(trace(4.0, "chat"), hardware, Goal(Slo(0.5), max_devices=2), SearchOptions(120))
    (tried,) = [each.evaluation for each in found.variants if each.name == "late requests refused"]
    assert tried is not None
    assert tried.job.refuses
