from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, common_version
from tandem.errors import IncompatiblePools


@dataclass(frozen=True)
class TransferSide:
    protocol: int
    oldest_protocol: int


@pytest.mark.acceptance(28, here="today's code in the older version")
def test_this_release_and_the_one_before_understand_each_other() -> None:
    ours = TransferSide(PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION)
    before = TransferSide(PROTOCOL_VERSION - 1, max(1, OLDEST_PROTOCOL_VERSION - 1))
    assert common_version(ours, before) == common_version(before, ours) == PROTOCOL_VERSION - 1
    assert common_version(ours, ours) == PROTOCOL_VERSION


@pytest.mark.parametrize("other", [TransferSide(PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1), TransferSide(0, 0)])
def test_releases_too_far_apart_are_refused_with_both_ranges(other: TransferSide) -> None:
    with pytest.raises(IncompatiblePools, match=f"{other.oldest_protocol} to {other.protocol}") as refusal:
        common_version(TransferSide(PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION), other)
    assert refusal.value.field == "protocol"
