"""The address that a host shows to another is that of the way there."""

from __future__ import annotations

import pytest

from tandem.config.engine import EngineSpec
from tandem.config.launch import WorkerLaunch, address_towards
from tandem.config.model import ModelSpec, Role
from tandem.config.transfer import TransferSpec
from tandem.errors import ConfigError


def test_the_way_to_loopback_is_loopback() -> None:
    assert address_towards("127.0.0.1:50052") == "127.0.0.1"
    assert address_towards("localhost:1") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("peer", ["no-such-host.invalid:1", "127.0.0.1", "127.0.0.1:x", "[::1"])
def test_no_way_is_told_with_the_field(peer: str) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.bind_host") as raised:
        address_towards(peer)
    assert raised.value.field == "transfer.bind_host"


@pytest.mark.parametrize(("bind_host", "listens"), [("auto", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_a_worker_listens_where_its_host_reaches_the_controller(bind_host: str, listens: str) -> None:
    launch = WorkerLaunch(
        cluster="test",
        worker_id="decode-0",
        epoch=1,
        role=Role.DECODE,
        model=ModelSpec(),
        engine=EngineSpec(),
        model_dir="/models/tiny",
        transfer=TransferSpec(bind_host=bind_host),
        controller_address="127.0.0.1:50050",
        redis_url=None,
        run_dir="/tmp/none",
    )
    assert launch.bind_host == listens
