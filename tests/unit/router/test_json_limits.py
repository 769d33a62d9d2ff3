"""Limits count the objects that a parser would build: marks within strings do not count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.limits.json import JsonLimits, check_body
from tandem.errors import InputError

STRETCH = 64 << 10


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[[],[],[]]", "objects and lists"),
        (b'{"a":{"b":{}}}', "objects and lists"),
        (b'{"a":1,"b":2,"c":3,"d":4}', "keys"),
        (b'["a","b","c","d","e"]', "strings"),
        (b"[1,2,3,4,5,6,7]", "values"),
        (b'"\\\\",[[],[],[]]', "objects and lists"),  # a string that ends in a backslash
    ],
)
def test_the_exceeded_limit_is_named(body: bytes, what: str) -> None:
    with pytest.raises(InputError, match=f"expected at most [0-9]+ {what}"):
        check_body(body, JsonLimits(containers=2, keys=3, strings=4, values=6))


TEXTS = ["[" * 200_000, "{,:" * 90_000, '\\"[' * 90_000, "\\" * 200_001, '"' * 200_000, "a" * 200_000]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_marks_within_strings_do_not_count_at_any_block_boundary(text: str, shift: int) -> None:
    body = json.dumps({"prompt": "x" * (STRETCH - 14 + shift) + text})
    check_body(body.encode(), JsonLimits(containers=1, keys=1, strings=2, values=1))


def size(value: Any) -> tuple[int, int]:
    """The numbers of containers and of strings, including keys, in a JSON value."""
    if isinstance(value, dict):
        parts = [size(each) for each in value.values()]
        return 1 + sum(part[0] for part in parts), len(value) + sum(part[1] for part in parts)
    if isinstance(value, list):
        parts = [size(each) for each in value]
        return 1 + sum(part[0] for part in parts), sum(part[1] for part in parts)
    return 0, int(isinstance(value, str))


json_values = st.recursive(
    st.text(alphabet='a"\\[{,:é') | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\[{,:'), inner),
)


@given(json_values, st.booleans())
def test_a_body_passes_at_its_own_counts_and_not_below(value: Any, ascii_only: bool) -> None:
    containers, strings = size(value)
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    padded = body + b" " * (containers + 1)  # a body shorter than the limit is not counted
    check_body(padded, JsonLimits(containers=containers, strings=strings))
    if containers:
        with pytest.raises(InputError):
            check_body(padded, JsonLimits(containers=containers - 1, strings=strings))
    if strings:
        with pytest.raises(InputError):
            check_body(padded, JsonLimits(containers=containers, strings=strings - 1))
