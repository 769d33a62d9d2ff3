"""Planned faults: the same settings break the same operations in the same way."""

from __future__ import annotations

import pytest

from tandem.testing.models import FaultPlan, FaultSettings, OperationFault, OperationFaultKind


def run(settings: FaultSettings, points: list[str]) -> list[OperationFault | None]:
    plan = FaultPlan(settings)
    return [plan.next(point) for point in points]


POINTS = [f"point-{number % 3}" for number in range(300)]


def test_the_same_settings_break_the_same_operations() -> None:
    settings = FaultSettings(seed=5, rate=0.2)
    assert run(settings, POINTS) == run(settings, POINTS)
    assert run(settings, POINTS) != run(FaultSettings(seed=6, rate=0.2), POINTS)


def test_every_counts_only_the_points_it_is_for() -> None:
    faults = run(FaultSettings(every=4, points=("point-1",)), POINTS)
    broken = [number for number, fault in enumerate(faults) if fault is not None]
    assert broken == [number for number in range(300) if number % 3 == 1][3::4]


def test_first_and_limit_bound_what_breaks() -> None:
    faults = run(FaultSettings(every=1, first=10, limit=7), POINTS)
    assert [number for number, fault in enumerate(faults) if fault is not None] == list(range(10, 17))


def test_an_operation_breaks_only_in_ways_that_make_sense_there() -> None:
    plan = FaultPlan(FaultSettings(every=1, kinds=("flip", "hang")))
    assert plan.next("there", (OperationFaultKind.DROP, OperationFaultKind.DELAY)) is None
    assert all(
        (fault := plan.next("there", (OperationFaultKind.HANG,))) and fault.kind is OperationFaultKind.HANG
        for _ in range(20)
    )


def test_settings_survive_the_command_line() -> None:
    settings = FaultSettings(seed=3, kinds=("flip",), points=("piece",), every=16, limit=2)
    assert FaultSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    "text",
    ['{"every": 0}', "{}", '{"every": 2, "rate": 0.1}', '{"rate": 2}', '{"every": 2, "kinds": ["x"]}', '{"z": 1}'],
)
def test_settings_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="faults"):
        FaultSettings.from_json(text)
