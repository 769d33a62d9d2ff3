"""Tracebacks in logs: one a minute of each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.telemetry import logs
from tandem.telemetry.logs import RareTracebacks, TextFormatter


class Lines:
    """What a process logs, at times that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._filter = RareTracebacks(lambda: self.now_s)
        self._formatter = TextFormatter("router-0")

    def of(self, fail: Callable[[], object]) -> str:
        logger = logging.getLogger("tests.logs")
        try:
            fail()
        except Exception as error:
            info = (type(error), error, error.__traceback__)
            record = logger.makeRecord("tests.logs", logging.ERROR, __file__, 1, "it failed", (), info)
            assert self._filter.filter(record)
            return self._formatter.format(record)
        raise AssertionError("expected a failure")


def zero() -> object:
    return 1 / 0


def missing() -> object:
    return dict[str, int]()["name"]


def test_a_traceback_is_shown_once_a_minute_and_its_error_always() -> None:
    lines = Lines()
    assert "Traceback" in lines.of(zero)
    again = lines.of(zero)
    assert "Traceback" not in again
    assert "exception=ZeroDivisionError: division by zero" in again
    assert again.count("\n") == 0
    assert "Traceback" in lines.of(missing)  # of another kind
    lines.now_s += logs.TRACEBACK_S
    assert "Traceback" in lines.of(zero)
    assert "Traceback" not in lines.of(zero)


def test_the_kinds_that_are_remembered_are_bounded() -> None:
    lines = Lines()
    for number in range(2 * logs.KEPT_KINDS):
        kind = type(f"Error{number}", (Exception,), {})

        def fail(kind: type[Exception] = kind) -> object:
            raise kind("each of its own")

        assert "Traceback" in lines.of(fail)
    assert len(lines._filter._shown_s) == logs.KEPT_KINDS


def test_a_line_without_an_exception_passes_as_it_is() -> None:
    record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO"})
    assert RareTracebacks().filter(record)
    assert TextFormatter("p").format(record).endswith("p: hello")
