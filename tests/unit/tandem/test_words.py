"""Counts and sizes as messages say them."""

from __future__ import annotations

import pytest

from tandem.text.words import plural, size


@pytest.mark.parametrize(("count", "said"), [(0, "0 devices"), (1, "1 device"), (2, "2 devices")])
def test_one_is_no_plural(count: int, said: str) -> None:
    assert plural(count, "device") == said


@pytest.mark.parametrize(
    ("count_bytes", "said"), [(None, "–"), (0, "0 B"), (999, "999 B"), (2.5e6, "2.5 MB"), (3e11, "300 GB")]
)
def test_moved_bytes_are_said_in_decimal_units(count_bytes: float | None, said: str) -> None:
    assert size(count_bytes) == said
