"""The data connection of a `tcp` link, without a link: who gets in, and how its threads are woken."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.causes import HandoffFault
from kvtransfer.connection.data_socket import DataListener, connect_data
from kvtransfer.connection.sockets import join_address
from kvtransfer.control import TlsFiles
from tandem.rpc.tls import TlsContexts, load_tls

Authority = Callable[[str], Any]
QUICK_S = 20.0
WAYS = ["plain", "tls"]


def contexts_for(way: str, authority: Authority) -> TlsContexts | None:
    return load_tls(TlsFiles(**authority("ours").issue("worker"))) if way == "tls" else None


@pytest.mark.parametrize("way", WAYS)
async def test_who_shows_another_token_never_gets_in(authority: Authority, way: str) -> None:
    tls = contexts_for(way, authority)
    door = DataListener("127.0.0.1", tls)
    address = join_address("127.0.0.1", door.port)
    admitting = asyncio.create_task(door.admit(QUICK_S))
    impostor = await connect_data(address, bytes(32), tls, QUICK_S)
    friend = await connect_data(address, door.token, tls, QUICK_S)
    async with asyncio.timeout(QUICK_S):
        receiver = await admitting
    try:
        payload, arrived = secrets.token_bytes(300_000), bytearray(300_000)
        sending = asyncio.create_task(asyncio.to_thread(friend.send, [memoryview(payload)]))
        await asyncio.to_thread(receiver.receive, [memoryview(arrived)])
        await sending
        assert arrived == payload
    finally:
        for each in (impostor, friend, receiver):
            each.close()


@pytest.mark.parametrize("way", WAYS)
async def test_closing_wakes_a_thread_that_waits(authority: Authority, way: str) -> None:
    tls = contexts_for(way, authority)
    door = DataListener("127.0.0.1", tls)
    admitting = asyncio.create_task(door.admit(30.0))
    friend = await connect_data(join_address("127.0.0.1", door.port), door.token, tls, 30.0)
    receiver = await admitting
    waiting = asyncio.create_task(asyncio.to_thread(receiver.receive, [memoryview(bytearray(10))]))
    await asyncio.sleep(0.1)
    receiver.close()
    with pytest.raises(Exception, match="data connection ended"):
        async with asyncio.timeout(QUICK_S):
            await waiting
    friend.close()


@pytest.mark.parametrize("way", WAYS)
async def test_a_peer_that_stops_in_the_middle_is_given_up_by_both_sides(authority: Authority, way: str) -> None:
    tls = contexts_for(way, authority)
    door = DataListener("127.0.0.1", tls)
    admitting = asyncio.create_task(door.admit(0.2))
    friend = await connect_data(join_address("127.0.0.1", door.port), door.token, tls, 0.2)
    receiver = await admitting
    await asyncio.to_thread(friend.send, [memoryview(bytes(4))])
    try:
        with pytest.raises(HandoffFault, match=r"no byte moved for 0\.2 s"):
            await asyncio.to_thread(receiver.receive, [memoryview(bytearray(10))])
        with pytest.raises(HandoffFault, match=r"no byte moved for 0\.2 s"):  # nobody reads: the buffers fill
            await asyncio.to_thread(friend.send, [memoryview(bytes(64 << 20))])
    finally:
        receiver.close()
        friend.close()
