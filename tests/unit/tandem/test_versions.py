from __future__ import annotations

import pytest

from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from tandem.errors import IncompatibleVersions
from tandem.rpc.versions import Versions, common_version, stated_versions
from tandem.v1 import worker_pb2


@pytest.mark.acceptance(28, here="today's code in the older version")
def test_this_release_and_the_one_before_understand_each_other() -> None:
    ours = Versions(PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION)
    before = Versions(PROTOCOL_VERSION - 1, max(1, OLDEST_PROTOCOL_VERSION - 1))
    assert common_version(ours, before) == common_version(before, ours) == PROTOCOL_VERSION - 1
    assert common_version(ours, ours) == PROTOCOL_VERSION


@pytest.mark.parametrize("other", [Versions(PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1), Versions(0, 0)])
def test_releases_too_far_apart_are_refused_with_both_ranges(other: Versions) -> None:
    with pytest.raises(IncompatibleVersions, match=f"{other.oldest_protocol} to {other.protocol}") as refusal:
        common_version(Versions(PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION), other)
    assert refusal.value.field == "protocol"


@pytest.mark.parametrize(("first", "second", "older"), [((3, 2), (5, 4), "a"), ((5, 4), (3, 2), "b")])
def test_a_refusal_says_which_side_to_update(first: tuple[int, int], second: tuple[int, int], older: str) -> None:
    with pytest.raises(IncompatibleVersions, match=f"update {older} first"):
        common_version(Versions(*first), Versions(*second), ("a", "b"))


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        (worker_pb2.RouterHello(), Versions(3, 3)),
        (worker_pb2.RouterHello(protocol=4), Versions(4, 4)),
        (worker_pb2.RouterHello(protocol=5, oldest_protocol=4), Versions(5, 4)),
    ],
)
def test_a_side_that_states_no_range_supports_one_version(hello: worker_pb2.RouterHello, expected: Versions) -> None:
    assert stated_versions(hello, before_ranges=3) == expected
