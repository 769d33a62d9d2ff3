"""The checker of the chaos test sees what it is there to see."""

from __future__ import annotations

import pytest

from cluster.testing.chaos import Entry, History, Try


@pytest.mark.parametrize(
    ("texts", "ends", "wrong"),
    [
        (["ab", "abc"], ["right"], False),
        (["", "abc"], ["right"], False),
        (["ax", "abc"], ["right"], True),
        (["abcd"], ["APIConnectionError()"], True),
        (["ab"], ["APIConnectionError()"], False),
        (["abc"], ["wrong"], True),
    ],
)
def test_a_try_that_was_cut_must_have_begun_the_right_answer(texts: list[str], ends: list[str], wrong: bool) -> None:
    entry = Entry("abc", ends, [Try("r", text=each) for each in texts])
    history = History([entry, Entry("abc", ["right"], [Try("r", text="abc")])])
    assert history.wrong == wrong
    assert history.success == (1.0 if ends == ["right"] else 0.5)


def test_a_router_is_asked_only_for_what_its_present_process_was_sent() -> None:
    tries = [Try("a", began_s=1.0), Try("b", began_s=2.0), Try("a", began_s=3.0)]
    assert History([Entry("", tries=tries)]).tries("a", since_s=2.0) == [tries[2]]
