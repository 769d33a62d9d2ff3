"""TLS at the edge, for HTTP and gRPC: versions, client certificates and renewal."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from cluster.control.router_traces import RouterTraces
from router.app import RouterApp
from router.edge.tls import HANDSHAKE_TIMEOUT_S
from router.testing.stub_worker import until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.router import RouterSpec
from tandem.config.security import EdgeTlsSpec
from tandem.errors import ConfigError
from tandem.v1 import inference_pb2, trace_pb2
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.conftest import Authority

MakeAuthority = Callable[[str], Authority]
NAME = "edge.example"
SECRET = "only-the-controller-knows"


@asynccontextmanager
async def router(model_dir: Path, tls: EdgeTlsSpec, socket: str | None = None) -> AsyncIterator[RouterApp]:
    served = ServedModel(name="tiny", model_dir=str(model_dir), model_fingerprint="f", block_tokens=16)
    launch = RouterLaunch(
        cluster="test",
        router_id="router-0",
        router=RouterSpec(http_port=0, grpc_port=0, tls=tls),
        models=(served,),
        controller_address="127.0.0.1:1",
        redis_url=None,
        controller_secret=SECRET,
        controller_socket=socket,
    )
    app = RouterApp(launch)
    await app.start()
    try:
        yield app
    finally:
        await app.close()


def put(files: dict[str, str], folder: Path, client_ca: Path | None = None) -> EdgeTlsSpec:
    """Writes to the same paths each time."""
    folder.mkdir(exist_ok=True)
    for name in ("cert", "key"):
        shutil.copy(files[name], folder / name)
    return EdgeTlsSpec(
        cert=str(folder / "cert"), key=str(folder / "key"), client_ca=str(client_ca) if client_ca else None
    )


def client_context(trusted: Path, own: dict[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    context.check_hostname = False
    if own is not None:
        context.load_cert_chain(own["cert"], own["key"])
    return context


async def by_http(app: RouterApp, trusted: Path, own: dict[str, str] | None = None) -> int:
    async with httpx.AsyncClient(verify=client_context(trusted, own), timeout=30.0) as http:
        return (await http.get(f"https://127.0.0.1:{app.http_port}/health")).status_code


def credentials(trusted: Path, own: dict[str, str] | None) -> grpc.ChannelCredentials:
    pair = [None, None] if own is None else [Path(own[name]).read_bytes() for name in ("key", "cert")]
    return grpc.ssl_channel_credentials(trusted.read_bytes(), *pair)


async def by_grpc(app: RouterApp, trusted: Path, own: dict[str, str] | None = None) -> list[str]:
    options = [("grpc.ssl_target_name_override", NAME)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{app.grpc_port}", credentials(trusted, own), options) as channel:
        answer = await InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=30.0)
        return [model.name for model in answer.models]


async def test_both_ports_accept_tls_only(model_dir: Path, authority: MakeAuthority, tmp_path: Path) -> None:
    ours, theirs = authority("ours"), authority("theirs")
    async with router(model_dir, put(ours.issue(NAME), tmp_path / "tls")) as app:
        assert await by_http(app, ours.ca) == 200
        assert await by_grpc(app, ours.ca) == ["tiny"]
        with pytest.raises(httpx.ConnectError):
            await by_http(app, theirs.ca)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await by_grpc(app, theirs.ca)
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(f"http://127.0.0.1:{app.http_port}/health")


@pytest.mark.parametrize(("version", "is_taken"), [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)])
async def test_versions_below_1_2_are_refused_and_http_1_1_is_negotiated(
    model_dir: Path, authority: MakeAuthority, tmp_path: Path, version: ssl.TLSVersion, is_taken: bool
) -> None:
    ours = authority("ours")
    context = client_context(ours.ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of TLS 1.1
        context.minimum_version = context.maximum_version = version
    async with router(model_dir, put(ours.issue(NAME), tmp_path / "tls")) as app:
        for port, protocol in ((app.http_port, "http/1.1"), (app.grpc_port, "h2")):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            except (ssl.SSLError, ConnectionError):
                assert not is_taken
                continue
            assert is_taken
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == protocol
            writer.close()


async def test_with_client_ca_a_client_without_a_certificate_of_it_is_refused(
    model_dir: Path, authority: MakeAuthority, tmp_path: Path
) -> None:
    ours, clients, theirs = authority("ours"), authority("clients"), authority("theirs")
    spec = put(ours.issue(NAME), tmp_path / "tls", clients.ca)
    async with router(model_dir, spec, socket=str(tmp_path / "controller.sock")) as app:
        good = clients.issue("client")
        assert (await by_http(app, ours.ca, good), await by_grpc(app, ours.ca, good)) == (200, ["tiny"])
        for bad in (None, theirs.issue("client"), clients.issue("late", expired=True)):
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                await by_http(app, ours.ca, bad)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await by_grpc(app, ours.ca, bad)
        controller = RouterTraces({"router-0": f"unix:{tmp_path / 'controller.sock'}"}, SECRET)
        assert list((await controller.list(trace_pb2.ListTracesRequest())).traces) == [], "it needs no certificate"


async def test_new_connections_get_renewed_certificates_and_open_ones_stay(
    model_dir: Path, authority: MakeAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.edge.tls")
    ours, theirs = authority("ours"), authority("theirs")
    async with (
        router(model_dir, put(ours.issue(NAME), tmp_path / "tls")) as app,
        httpx.AsyncClient(verify=client_context(ours.ca)) as http,
    ):
        url = f"https://127.0.0.1:{app.http_port}/health"
        assert (await http.get(url)).status_code == 200
        renewed = theirs.issue(NAME)
        shutil.copy(renewed["cert"], tmp_path / "tls" / "cert")
        await until(lambda: "kept the previous certificates" in caplog.text)
        assert await by_http(app, ours.ca) == 200, "they do not fit each other yet"
        assert await by_grpc(app, ours.ca) == ["tiny"]
        shutil.copy(renewed["key"], tmp_path / "tls" / "key")
        await until(lambda: "loaded renewed certificates" in caplog.text)
        assert await by_http(app, theirs.ca) == 200
        assert await by_grpc(app, theirs.ca) == ["tiny"]
        assert (await http.get(url)).status_code == 200


async def test_a_client_without_a_handshake_is_disconnected(
    model_dir: Path, authority: MakeAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HANDSHAKE_TIMEOUT_S <= 10.0
    monkeypatch.setattr("router.edge.http_server.HANDSHAKE_TIMEOUT_S", 0.3)
    async with router(model_dir, put(authority("ours").issue(NAME), tmp_path / "tls")) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.http_port)
        async with asyncio.timeout(30.0):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
def test_a_file_that_cannot_be_used_is_named(
    model_dir: Path, authority: MakeAuthority, tmp_path: Path, name: str
) -> None:
    ours = authority("ours")
    spec = put(ours.issue(NAME), tmp_path / "tls", ours.ca)
    noise = tmp_path / "noise"
    for path in (noise, tmp_path / "nowhere"):
        noise.write_bytes(b"noise")

        async def start(path: Path = path) -> None:
            async with router(model_dir, spec.model_copy(update={name: str(path)})):
                pass

        with pytest.raises(ConfigError) as refused:
            asyncio.run(start())
        assert refused.value.field == f"router.tls.{name}"
