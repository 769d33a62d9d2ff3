"""Counts, sizes and workers as messages say them."""

from __future__ import annotations

import pytest

from tandem.text.words import named_role, plural, size, worker_name, worker_path


@pytest.mark.parametrize(("count", "said"), [(0, "0 devices"), (1, "1 device"), (2, "2 devices")])
def test_one_is_no_plural(count: int, said: str) -> None:
    assert plural(count, "device") == said


@pytest.mark.parametrize(
    ("count_bytes", "said"), [(None, "–"), (0, "0 B"), (999, "999 B"), (2.5e6, "2.5 MB"), (3e11, "300 GB")]
)
def test_moved_bytes_are_said_in_decimal_units(count_bytes: float | None, said: str) -> None:
    assert size(count_bytes) == said


@pytest.mark.parametrize(
    ("worker_id", "role", "shown"),
    [
        ("prefill-1", "prefill", "prefill-1"),
        ("prefill-1", "decode", "prefill-1 (decode)"),
        ("decode-10", "prefill", "decode-10 (prefill)"),
        ("qwen-3-decode-0", "prefill", "qwen-3-decode-0 (prefill)"),
        ("decode-prefill-0", "prefill", "decode-prefill-0"),  # a model whose name is a role
        ("prefiller-0", "decode", "prefiller-0"),
        ("w", "decode", "w"),
    ],
)
def test_a_worker_whose_id_names_another_role_is_shown_with_its_own(worker_id: str, role: str, shown: str) -> None:
    assert worker_name(worker_id, role) == shown


def test_only_the_word_before_the_number_is_the_role_of_an_id() -> None:
    ids = ("prefill-0", "m-decode-2", "prefill", "decode-m-1", "")
    assert [named_role(each) for each in ids] == ["prefill", "decode", None, None, None]


def test_a_path_names_the_roles_that_the_ids_do_not() -> None:
    assert worker_path("prefill-0", "decode-0") == "prefill-0 → decode-0"
    assert worker_path("decode-1", "prefill-1") == "decode-1 (prefill) → prefill-1 (decode)"
    assert worker_path("", "prefill-1", ", without a handoff") == "prefill-1 (decode), without a handoff"
