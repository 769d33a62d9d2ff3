"""A cluster that requires mutual TLS, Ray's ports included: what listens is what docs/security.md says, and no port
takes a stranger. Certificates are renewed while it works."""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.certificates import create, folder_spec
from tandem.config.security import TlsSpec
from tandem.request import SamplingParams
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.conftest import Reference
from tests.e2e.conftest import Cluster, start_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME = "mtls"
VOCAB = 300
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
GRPC_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
KV_HELLO = struct.pack("<I", 64)  # the length of a message that does not come
ANSWERS_S = 60.0  # for what a port does in any case
KEEPS_S = 1.0  # so long a peer's connection must last
CLOSES_S = 10.0  # a port that has refused a connection has closed it by then


@dataclass(frozen=True)
class Row:
    """One line of the port table."""

    port: str
    process: str
    auth: str


@dataclass(frozen=True)
class Socket:
    """One that listens."""

    host: str
    port: int
    command: str


@dataclass
class Secured:
    cluster: Cluster
    certs: Path
    model: Path
    strangers: dict[str, TlsSpec]  # certificates that no port takes
    sockets: list[Socket]

    @property
    def files(self) -> TlsSpec:
        return folder_spec(self.certs)

    def tls(self, identity: Identity) -> ClusterTls:
        return ClusterTls(NAME, identity, self.files)

    def edge(self) -> grpc.aio.Channel:
        roots = grpc.ssl_channel_credentials((self.certs / "ca.pem").read_bytes())
        return grpc.aio.secure_channel(f"127.0.0.1:{self.cluster.grpc_port}", roots)

    async def answer(self, channel: grpc.aio.Channel, prompt: list[int], max_tokens: int) -> list[int]:
        request = inference_pb2.GenerateRequest(
            model="tiny",
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens),
        )
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        return [token async for event in stub.Generate(request) for token in event.chunk.token_ids]


def table() -> list[Row]:
    lines = [line for line in PAGE.read_text().split("## Ports")[1].split("\n## ")[0].splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [Row(port.strip("`"), process.strip("`"), auth) for port, process, _, _, auth, _ in rows]


def listening(cluster: Cluster) -> list[Socket]:
    found = []
    top = psutil.Process(cluster.process.pid)
    for process in [top, *top.children(recursive=True)]:
        try:
            command = " ".join(process.cmdline())
            found += [
                Socket(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port, command)
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            ]
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return found


def rows_of(sock: Socket, cluster: Cluster) -> list[Row]:
    known = {
        "router.http_port": cluster.http_port,
        "router.grpc_port": cluster.grpc_port,
        "control.admin_port": cluster.admin_port,
    }
    key = next((name for name, port in known.items() if port == sock.port), None)
    rows = [row for row in table() if row.process in sock.command]
    fitting = [row for row in rows if (row.port == key if key else row.port not in known)]
    return [row for row in fitting if len(row.process) == max(len(other.process) for other in fitting)]


def lapsed(certs: Path, folder: Path) -> TlsSpec:
    """Certificates as the cluster's own, which expired yesterday."""
    authority = x509.load_pem_x509_certificate((certs / "ca.pem").read_bytes())
    key = serialization.load_pem_private_key((certs / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    shutil.copytree(certs, folder)
    now = datetime.datetime.now(datetime.UTC)
    for identity in Identity:
        path = folder / f"{identity}.pem"
        former = x509.load_pem_x509_certificate(path.read_bytes())
        builder = (
            x509.CertificateBuilder(former.issuer, former.subject, former.public_key(), former.serial_number)
            .not_valid_before(now - datetime.timedelta(days=9))
            .not_valid_after(now - datetime.timedelta(days=1))
        )
        for extension in former.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        assert authority.subject == former.issuer
        path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return folder_spec(folder)


def role_for(row: Row) -> Identity:
    """Whose certificate the port takes."""
    return {"worker.service": Identity.ROUTER, "kvtransfer.agent": Identity.WORKER}.get(
        row.process, Identity.ADMIN if row.port == "control.admin_port" else Identity.CONTROLLER
    )


def is_taken(sock: Socket, files: TlsSpec | None, *, plain: bool = False, for_s: float = CLOSES_S) -> bool:
    """Whether the port keeps the connection `for_s`. In TLS 1.3 a client hears only afterwards what came of its
    certificate."""
    try:
        with socket.create_connection((sock.host, sock.port), timeout=ANSWERS_S) as raw:
            if plain:
                return keeps(raw, GRPC_HELLO, for_s)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            if files is not None:
                context.load_cert_chain(files.cert, files.key)
            with context.wrap_socket(raw) as secured:
                return keeps(secured, KV_HELLO if "kvtransfer" in sock.command else GRPC_HELLO, for_s)
    except (ssl.SSLError, ConnectionError):
        return False


def keeps(connection: socket.socket, hello: bytes, for_s: float) -> bool:
    connection.settimeout(for_s)
    try:
        connection.sendall(hello)
        return bool(connection.recv(1))
    except TimeoutError:
        return True  # it waits for more
    except (ssl.SSLError, ConnectionError):
        return False


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("mtls")
    certs, others = folder / "certs", folder / "others"
    create(certs, NAME, [], days=90, authority_days=900)
    create(others, NAME, [], days=90, authority_days=900)
    strangers = {"wrong authority": folder_spec(others), "expired": lapsed(certs, folder / "lapsed")}
    model = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    spec = {
        "models": [{"source": str(model), "engine": {"kv_blocks": 400}}],
        "transfer": {"transport": "tcp"},
        "router": {"disaggregation": "always"},
    }
    cluster = start_cluster(folder, "--name", NAME, "--tls", str(certs), spec=spec, ca=certs / "ca.pem")
    yield Secured(cluster, certs, model, strangers, listening(cluster))
    assert cluster.stop() == 0, cluster.log.read_text()[-4000:]
    assert cluster.survivors() == []


@pytest.mark.acceptance(36, here="as stated")
def test_what_listens_is_what_the_page_says(secured: Secured) -> None:
    found = {sock: rows_of(sock, secured.cluster) for sock in secured.sockets}
    assert all(len(rows) == 1 for rows in found.values()), found
    assert {rows[0] for rows in found.values()} == set(table())
    assert {sock.host for sock in secured.sockets} == {"127.0.0.1"}


@pytest.mark.acceptance(36, here="as stated")
def test_every_internal_port_takes_its_peers_and_no_stranger(secured: Secured) -> None:
    for sock in secured.sockets:
        (row,) = rows_of(sock, secured.cluster)
        if row.auth != "mutual TLS":
            continue
        role = role_for(row)
        assert is_taken(sock, secured.files.of(role), for_s=KEEPS_S), f"{row} refused {role}"
        assert not is_taken(sock, None), f"{row} took no certificate"
        assert not is_taken(sock, None, plain=True), f"{row} took plain text"
        for kind, files in secured.strangers.items():
            assert not is_taken(sock, files.of(role)), f"{row}: {kind}"
        assert not is_taken(sock, secured.files.of("edge")), f"{row} took the edge's certificate"


def test_rays_own_http_port_wants_the_token(secured: Secured) -> None:
    (sock,) = (each for each in secured.sockets if "RuntimeEnvAgent" in each.command)
    for headers in ({}, {"Authorization": f"Bearer {'0' * 64}"}):
        answer = httpx.post(
            f"http://127.0.0.1:{sock.port}/get_or_create_runtime_env", headers=headers, content=b"", timeout=ANSWERS_S
        )
        assert answer.status_code in (401, 403), answer.text


async def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call()
    return refused.value.code().name


RAY_METHODS = {
    "gcs_server": "NodeInfoGcsService/GetAllNodeInfo",
    "raylet": "NodeManagerService/GetNodeStats",
    "ray::": "CoreWorkerService/GetCoreWorkerStats",
}


@pytest.mark.parametrize("token", [None, "0" * 64])
async def test_rays_ports_want_the_token_beside_the_certificate(secured: Secured, token: str | None) -> None:
    tls = secured.tls(Identity.CONTROLLER)
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    asked: dict[str, set[str]] = {}
    for sock in secured.sockets:
        (row,) = rows_of(sock, secured.cluster)
        if row.process in RAY_METHODS:
            credentials = tls.client_credentials()
            async with grpc.aio.secure_channel(f"{sock.host}:{sock.port}", credentials) as channel:
                path = f"/ray.rpc.{RAY_METHODS[row.process]}"
                method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
                came = await refusal(lambda method=method: method(b"", metadata=metadata, timeout=ANSWERS_S))  # type: ignore[misc]
                asked.setdefault(row.process, set()).add(came)
    assert asked["gcs_server"] == asked["ray::"] == {"UNAUTHENTICATED"}
    assert asked["raylet"] == {"UNAUTHENTICATED", "UNIMPLEMENTED"}, "one of its two ports has another service"


def test_the_edge_speaks_tls_only(secured: Secured) -> None:
    cluster = secured.cluster
    assert httpx.get(f"{cluster.base_url}/health", verify=cluster.verify, timeout=ANSWERS_S).status_code == 200
    for port in (cluster.http_port, cluster.grpc_port):
        sock = Socket("127.0.0.1", port, "")
        assert not is_taken(sock, None, plain=True)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{cluster.base_url}/health")  # it does not know the authority


async def test_a_certificate_is_good_for_its_role_alone(secured: Secured) -> None:
    admin = f"127.0.0.1:{secured.cluster.admin_port}"
    shutdown, register = cluster_pb2.ShutdownRequest(), cluster_pb2.RegisterRequest()
    for identity in (Identity.WORKER, Identity.ROUTER):
        async with open_channel(admin, secured.tls(identity), Identity.CONTROLLER) as channel:
            stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
            assert await refusal(lambda stub=stub: stub.Shutdown(shutdown)) == "PERMISSION_DENIED"  # type: ignore[misc]
            came = await refusal(lambda stub=stub: stub.Register(register))  # type: ignore[misc]
            assert came == ("FAILED_PRECONDITION" if identity is Identity.WORKER else "PERMISSION_DENIED")
    worker = secured.cluster.worker("decode")["address"]
    async with open_channel(worker, secured.tls(Identity.WORKER), Identity.WORKER) as channel:
        workers: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        assert await refusal(lambda: workers.GetState(worker_pb2.GetStateRequest())) == "PERMISSION_DENIED"
    async with open_channel(worker, secured.tls(Identity.ROUTER), Identity.CONTROLLER) as channel:
        posing: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        assert await refusal(lambda: posing.GetState(worker_pb2.GetStateRequest())) == "UNAVAILABLE"
    agent = next(sock for sock in secured.sockets if "kvtransfer.agent" in sock.command)
    assert not is_taken(agent, secured.files.of(Identity.ROUTER)), "KV blocks are for workers"


async def test_answers_are_exact_over_tls(secured: Secured, reference_for: Callable[[Path], Reference]) -> None:
    prompt = random_prompt(90, VOCAB, 3)
    async with secured.edge() as channel:
        answer = await secured.answer(channel, prompt, 24)
    assert answer == reference_for(secured.model).answer(prompt, SamplingParams(temperature=0.0, max_tokens=24))
    links = [link for worker in secured.cluster.status()["workers"] for link in worker["links"]]
    assert {link["transport"] for link in links} == {"tcp"}
    assert sum(link["bytes"] for link in links) > 0
    secured.cluster.assert_conserved()


def test_commands_show_who_they_are(secured: Secured) -> None:
    cluster = secured.cluster
    address = f"127.0.0.1:{cluster.admin_port}"
    assert "decode-0" in cluster.tandem("status", "--address", address, "--tls", str(secured.certs)).stdout
    refused = cluster.tandem("status", "--address", address)
    assert (refused.returncode, "pass --tls" in refused.stderr) == (2, True), refused.stderr
    assert cluster.tandem("trace").returncode == 0
    answer = cluster.tandem("chat", "Hi", "--model", "tiny", "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def serial(port: int) -> int:
    """Of the certificate that a port shows now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWERS_S) as raw, context.wrap_socket(raw) as secured:
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


async def test_renewal_under_load_fails_no_request_and_reaches_every_port(secured: Secured) -> None:
    ours = [sock.port for sock in secured.sockets if re.search(r"-m router|worker\.service|kvtransfer", sock.command)]
    ours.append(secured.cluster.admin_port)
    before = {port: serial(port) for port in ours}
    answers: list[list[int]] = []
    prompt = random_prompt(60, VOCAB, 5)
    done = asyncio.Event()

    async def client() -> None:
        while not done.is_set():
            async with secured.edge() as channel:  # a handshake for each
                answers.append(await secured.answer(channel, prompt, 8))
            async with httpx.AsyncClient(verify=secured.cluster.verify, timeout=ANSWERS_S) as http:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                (await http.post(f"{secured.cluster.base_url}/v1/completions", json=body)).raise_for_status()

    clients = [asyncio.create_task(client()) for _ in range(3)]
    renewed = await asyncio.to_thread(secured.cluster.tandem, "certs", "renew", str(secured.certs))
    assert renewed.returncode == 0, renewed.stderr
    deadline_s = time.monotonic() + ANSWERS_S
    left = set(ours)
    while left or len(answers) <= 5:  # the HTTP edge looks every second
        assert time.monotonic() < deadline_s, (left, len(answers))
        left = {port for port in left if await asyncio.to_thread(serial, port) == before[port]}
        await asyncio.sleep(0.2)
    done.set()
    await asyncio.gather(*clients)
    assert len(set(map(tuple, answers))) == 1
    killed = secured.cluster.worker("prefill")
    os.kill(next(each["pid"] for each in killed["processes"] if each["name"] == "service"), signal.SIGKILL)
    deadline_s = time.monotonic() + 120.0
    while (now := secured.cluster.worker("prefill"))["epoch"] == killed["epoch"] or now["state"] != "ready":
        assert time.monotonic() < deadline_s, now
        await asyncio.sleep(0.3)
    async with secured.edge() as channel:
        assert await secured.answer(channel, prompt, 8) == answers[0]
    secured.cluster.note_descendants()
    secured.cluster.assert_conserved()
