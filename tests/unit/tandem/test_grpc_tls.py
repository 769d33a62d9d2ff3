"""gRPC inside the cluster: who is who, who may call what, and renewal of what they show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.certificates import create, folder_spec, renew
from cluster.control.admin_service import ALLOWED as ADMIN_METHODS
from tandem.config.security import TlsSpec
from tandem.rpc.grpc_tls import ChannelCache, ClusterTls, add_port, make_server, open_channel
from tandem.rpc.identity import Identity
from tandem.v1 import cluster_pb2, worker_pb2
from worker.service import ALLOWED as WORKER_METHODS

ALLOWED = {f"/s/{kind}": frozenset({Identity.ROUTER}) for kind in ("One", "Many", "Collect", "Talk")}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certs"
    create(folder, "east", [], days=90, authority_days=900)
    return folder


def other_cluster(folder: Path) -> TlsSpec:
    create(folder, "west", [], days=90, authority_days=900)
    return folder_spec(folder)


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _many(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield request


async def _collect(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([each async for each in requests])


async def _talk(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for each in requests:
        yield each


@asynccontextmanager
async def server(tls: ClusterTls | None) -> AsyncIterator[str]:
    """A worker's, of methods of all four kinds; `Nobody` is in no list."""
    running = make_server(tls, ALLOWED, ())
    methods: dict[str, Any] = {
        "One": grpc.unary_unary_rpc_method_handler(_echo),
        "Nobody": grpc.unary_unary_rpc_method_handler(_echo),
        "Many": grpc.unary_stream_rpc_method_handler(_many),
        "Collect": grpc.stream_unary_rpc_method_handler(_collect),
        "Talk": grpc.stream_stream_rpc_method_handler(_talk),
    }
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = add_port(running, "127.0.0.1:0", tls)
    await running.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await running.stop(None)


async def calls(channel: grpc.aio.Channel) -> list[object]:
    async def two() -> AsyncIterator[bytes]:
        yield b"x"
        yield b"y"

    one: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/One")
    many: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/s/Many")
    collect: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/s/Collect")
    talk: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/s/Talk")
    return [
        await one(b"x"),
        [each async for each in many(b"x")],
        await collect(two()),
        [each async for each in talk(two())],
    ]


async def refusal(channel: grpc.aio.Channel, method: str = "/s/One") -> grpc.StatusCode:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"x", timeout=30.0)
    return refused.value.code()


def of(certs: Path, identity: Identity) -> ClusterTls:
    return ClusterTls("east", identity, folder_spec(certs))


@pytest.mark.parametrize("secured", [True, False])
async def test_all_kinds_of_calls_work_with_and_without_tls(certs: Path, secured: bool) -> None:
    worker, router = (of(certs, each) if secured else None for each in (Identity.WORKER, Identity.ROUTER))
    async with server(worker) as address, open_channel(address, router, Identity.WORKER) as channel:
        assert await calls(channel) == [b"x", [b"x"] * 3, b"xy", [b"x", b"y"]]


async def test_who_has_no_business_with_a_method_is_refused_in_every_kind_of_call(certs: Path) -> None:
    async with server(of(certs, Identity.WORKER)) as address:
        for identity in set(Identity) - {Identity.ROUTER}:
            async with open_channel(address, of(certs, identity), Identity.WORKER) as channel:
                assert await refusal(channel) is grpc.StatusCode.PERMISSION_DENIED
                many: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/s/Many")
                talk: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/s/Talk")
                for call in (many(b"x"), talk(_requests())):
                    with pytest.raises(grpc.aio.AioRpcError, match="expected a certificate of router"):
                        [each async for each in call]
        async with open_channel(address, of(certs, Identity.ROUTER), Identity.WORKER) as channel:
            assert await refusal(channel, "/s/Nobody") is grpc.StatusCode.PERMISSION_DENIED
            assert await refusal(channel, "/s/Missing") is grpc.StatusCode.UNIMPLEMENTED


async def _requests() -> AsyncIterator[bytes]:
    yield b"x"


async def test_a_server_must_be_who_the_caller_asks_for(certs: Path, tmp_path: Path) -> None:
    west = other_cluster(tmp_path / "west")
    async with server(of(certs, Identity.WORKER)) as address:
        for tls, peer in (
            (of(certs, Identity.ROUTER), Identity.CONTROLLER),
            (ClusterTls("west", Identity.ROUTER, west), Identity.WORKER),
        ):
            async with open_channel(address, tls, peer) as channel:
                assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address, None, Identity.WORKER) as channel:
            assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_certificates_of_another_cluster_of_the_same_authority_give_no_role_here(
    certs: Path,
) -> None:
    west = ClusterTls("west", Identity.WORKER, folder_spec(certs))  # it shows a certificate of east
    async with (
        server(west) as address,
        open_channel(address, of(certs, Identity.ROUTER), Identity.WORKER) as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.PERMISSION_DENIED


async def test_both_sides_show_renewed_certificates_at_the_next_connection(certs: Path) -> None:
    tls = of(certs, Identity.WORKER)
    channels = ChannelCache(of(certs, Identity.ROUTER), Identity.WORKER)
    async with server(tls) as address:
        first = await channels.get("w", address)
        one: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = first.unary_unary("/s/One")
        assert await one(b"x") == b"x"
        assert await channels.get("w", address) is first
        before = tls.current().cert_pem
        renew(certs, 90)
        second = await channels.get("w", address)
        assert second is not first
        one = second.unary_unary("/s/One")
        assert await one(b"y") == b"y"
        assert tls.current().cert_pem != before
        await channels.close()


@pytest.mark.parametrize(
    ("service", "allowed"),
    [
        (cluster_pb2.DESCRIPTOR.services_by_name["Cluster"], ADMIN_METHODS),
        (worker_pb2.DESCRIPTOR.services_by_name["Worker"], WORKER_METHODS),
    ],
)
def test_every_internal_method_says_who_may_call_it(service: Any, allowed: dict[str, frozenset[Identity]]) -> None:
    assert set(allowed) == {f"/{service.full_name}/{method.name}" for method in service.methods}


def test_a_worker_may_register_and_follow_and_nothing_else() -> None:
    may = {method.rsplit("/", 1)[1] for method, who in ADMIN_METHODS.items() if Identity.WORKER in who}
    assert may == {"Register", "WatchDirectory"}
    assert not any(Identity.WORKER in who for who in WORKER_METHODS.values())
