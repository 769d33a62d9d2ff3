"""When an engine counts as hung: after its limit without a message, of time in which this process ran too."""

from __future__ import annotations

import pytest

from worker.engine_watch import HangWatch


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def watch(asked: list[str]) -> HangWatch:
    return HangWatch(lambda: asked.append("state"), limit_s=60.0)


def test_an_engine_that_is_silent_for_the_limit_hangs(watch: HangWatch, asked: list[str]) -> None:
    assert [watch.passed(1.0, 1.0) for _ in range(61)] == [False] * 60 + [True]
    assert asked == ["state"]  # it is asked once, not every second


def test_a_step_of_any_length_that_reports_layers_does_not(watch: HangWatch) -> None:
    for _ in range(10):
        assert not any(watch.passed(1.0, 1.0) for _ in range(50))
        watch.heard()


def test_an_idle_engine_answers_and_is_asked_again(watch: HangWatch, asked: list[str]) -> None:
    for _ in range(100):
        assert not watch.passed(1.0, 1.0)
        watch.heard()
    assert len(asked) == 100


def test_a_suspended_host_is_no_hang(watch: HangWatch) -> None:
    assert not watch.passed(3600.0, 1.0)
