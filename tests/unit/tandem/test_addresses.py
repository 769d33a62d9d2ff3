"""The address that a host shows to another is that of the way there."""

from __future__ import annotations

import pytest

from tandem.addresses import address_towards
from tandem.errors import ConfigError


def test_the_way_to_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1:50052") == "127.0.0.1"
    assert address_towards("localhost:1") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("peer", ["no-such-host.invalid:1", "127.0.0.1", "127.0.0.1:x", "[::1"])
def test_no_way_is_told_with_the_field(peer: str) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.bind_host") as raised:
        address_towards(peer)
    assert raised.value.field == "transfer.bind_host"
