"""Every method of every gRPC service of a running cluster against messages that fit, damaged ones and raw bytes.

Nothing may crash, answer INTERNAL or UNKNOWN, leak a block or grow; and a request afterwards is answered as before.
"""

from __future__ import annotations

import contextlib
import operator
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.oip import grpc_predict_v2_pb2
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, trace_pb2, worker_pb2
from tandem.vllm_api import inference_pb2 as vllm_pb2
from tests.e2e.conftest import Cluster
from worker.wire import PROTOCOL_VERSION

pytestmark = pytest.mark.slow

EXAMPLES = 150 if os.environ.get("TANDEM_SOAK") else 8  # of each method
MIB = 1 << 20
GROWTH_BYTES = 50 * MIB
CALL_S = 10.0
FOLLOW_S = 0.02  # how long one listens to a stream that has no end
ENDLESS = {"WatchDirectory", "Watch", "RecordRequests"}
SETTLE_S = 0.03  # a session stays so long after its last frame
MAX_DEPTH = 5
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE}

ROUTER_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    grpc_predict_v2_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    vllm_pb2.DESCRIPTOR.services_by_name["Inference"],
    trace_pb2.DESCRIPTOR.services_by_name["Traces"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
ADMIN_SERVICE = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"]
WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]

# By chance nothing would get past the first check: names that there are, numbers of a size that fits.
WORDS = ["tiny", "", "tiny", "a", "b", "decode-0", "prefill-0", "user", "input_ids", "text_input", "INT32", "BYTES"]
EDGES = st.sampled_from([1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
NUMBERS = st.one_of(st.integers(1, 2), st.integers(0, 9), st.integers(0, 63), st.integers(0, 319), EDGES)
FLOATS = st.one_of(st.floats(0.125, 1, width=32), st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32))
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=12)).map(str.encode)
BYTES = st.one_of(TEXTS, st.binary(max_size=12))
FIXED = {
    FieldDescriptor.TYPE_DOUBLE: "<d",
    FieldDescriptor.TYPE_FLOAT: "<f",
    FieldDescriptor.TYPE_FIXED32: "<I",
    FieldDescriptor.TYPE_FIXED64: "<Q",
}


def varint(number: int) -> bytes:
    head = b""
    while number > 0x7F:
        head, number = head + bytes([number & 0x7F | 0x80]), number >> 7
    return head + bytes([number])


def sized(content: bytes) -> bytes:
    return varint(len(content)) + content


@st.composite
def encoded(draw: st.DrawFn, kind: Descriptor, depth: int = 0) -> bytes:
    """A message on the wire: most of its fields, one of each oneof, values that fit their types and little else."""
    parts = [draw(one_field(field, depth)) for field in kind.fields if field.containing_oneof is None]
    parts += [draw(st.sampled_from(list(group.fields)).flatmap(lambda f: one_field(f, depth))) for group in kind.oneofs]
    return b"".join(parts)


@st.composite
def one_field(draw: st.DrawFn, field: FieldDescriptor, depth: int) -> bytes:
    if draw(st.integers(0, 7)) == 0 or depth == MAX_DEPTH:
        return b""
    most = 2 if field.message_type is not None else 4
    values = [draw(value(field, depth)) for _ in range(draw(st.integers(0, most)) if field.is_repeated else 1)]
    return b"".join(varint(field.number << 3 | wire) + content for wire, content in values)


def value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[tuple[int, bytes]]:
    """(wire type, content)."""
    if field.message_type is not None:
        return encoded(field.message_type, depth + 1).map(lambda content: (2, sized(content)))
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        content = TEXTS if field.type == FieldDescriptor.TYPE_STRING else BYTES
        return content.map(lambda text: (2, sized(text)))
    if field.type in FIXED:
        form = FIXED[field.type]
        numbers = FLOATS if form in "<d<f" else NUMBERS.map(lambda n: n % (1 << 32))
        return numbers.map(lambda number: (1 if form in "<d<Q" else 5, struct.pack(form, number)))
    return NUMBERS.map(lambda number: (0, varint(number)))


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    at = draw(st.integers(0, len(whole)))
    match draw(st.sampled_from(["cut", "flip", "insert", "repeat"])):
        case "cut":
            return whole[:at]
        case "flip":
            return whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :]
        case "insert":
            return whole[:at] + draw(st.binary(max_size=8)) + whole[at:]
        case _:
            return whole + whole[at:]


@st.composite
def payload(draw: st.DrawFn, kind: Descriptor) -> bytes:
    dice = draw(st.integers(0, 9))
    if dice == 9:
        return draw(st.binary(max_size=64))
    whole = draw(encoded(kind))
    return whole if dice < 7 else draw(damaged(whole))


def streams(method: MethodDescriptor) -> st.SearchStrategy[list[bytes]]:
    """What the client sends. A session with a worker begins with a hello that is right, most of the time."""
    sent = payload(method.input_type)
    if not method.client_streaming:
        return sent.map(lambda one: [one])
    frames = st.lists(sent, max_size=8)
    if method.name != "Session":
        return frames
    hello = worker_pb2.RouterFrame(hello=worker_pb2.RouterHello(router_id="a", protocol=PROTOCOL_VERSION))
    greeting = st.integers(0, 9).map(lambda dice: [hello.SerializeToString()] if dice else [])
    return st.builds(operator.add, greeting, frames)


def call(channel: grpc.Channel, method: MethodDescriptor, sent: Sequence[bytes]) -> grpc.StatusCode:
    """On the wire every call is a stream of messages each way."""

    def sending() -> Iterator[bytes]:
        yield from sent
        if method.name == "Session":
            time.sleep(SETTLE_S)

    path = f"/{method.containing_service.full_name}/{method.name}"
    timeout_s = FOLLOW_S if method.name in ENDLESS else CALL_S
    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    answers = stream(sending(), timeout=timeout_s, wait_for_ready=True)
    with contextlib.suppress(grpc.RpcError):
        for answer in answers:
            if method.name == "Session":
                for ended in worker_pb2.WorkerFrame.FromString(answer).ended:
                    assert ended.error.code != "internal", ended
    status: grpc.StatusCode = answers.code()
    assert status not in OURS, (path, status, answers.details())
    return status


def fuzz_method(channel: grpc.Channel, method: MethodDescriptor, seen: Counter[str]) -> None:
    """Raises on the first status that is ours, with the smallest message that gets it."""

    @given(sent=streams(method))
    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    def one(sent: list[bytes]) -> None:
        seen[call(channel, method, sent).name] += 1

    one()


OBEYED = ("Shutdown", "Scale", "DrainWorker", "RestartWorkers", "Apply")


def fuzz(address: str, service: ServiceDescriptor) -> Counter[str]:
    """Every method but those that would do as they say. Returns the statuses by name."""
    seen: Counter[str] = Counter()
    with grpc.insecure_channel(address) as channel:
        for method in service.methods:
            if method.name not in OBEYED:
                fuzz_method(channel, method, seen)
    return seen


def resident(pid: int) -> dict[int, int]:
    """Bytes of each process of the cluster."""
    found = psutil.Process(pid)
    return {process.pid: process.memory_info().rss for process in [found, *found.children(recursive=True)]}


def shown_services(address: str) -> set[str]:
    """What the router's port says it has."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(address) as channel:
        [answer] = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
    return {service.name for service in answer.list_services_response.service}


@pytest.fixture
def cluster(cluster_with: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TANDEM_MODELS__0__ENGINE__KV_BLOCKS", "128")
    model = write_tiny_llama(tmp_path / "tiny", max_positions=64)
    return cluster_with("--model", str(model), "--backend", "subprocess", "--disaggregation", "always")


@pytest.mark.soak
@pytest.mark.acceptance(34, here="8 messages for each method", soak="150")
def test_no_message_whatever_it_holds_harms_a_server_or_an_engine(cluster: Cluster) -> None:
    router, admin = f"127.0.0.1:{cluster.grpc_port}", f"127.0.0.1:{cluster.admin_port}"
    with grpc.insecure_channel(admin) as channel:
        status = cluster_pb2_grpc.ClusterStub(channel).GetStatus(cluster_pb2.GetStatusRequest())
    workers = [worker.info.address for worker in status.workers]
    targets = [(router, service) for service in ROUTER_SERVICES]
    targets += [(admin, ADMIN_SERVICE), *((address, WORKER_SERVICE) for address in workers)]
    assert shown_services(router) <= {service.full_name for service in ROUTER_SERVICES}
    before = resident(cluster.process.pid)
    for address, service in targets:
        print(service.full_name, address, dict(fuzz(address, service)))
    after = resident(cluster.process.pid)
    assert after.keys() == before.keys(), "a process ended or began"
    grown = {pid: after[pid] - before[pid] for pid in before}
    print("MiB more of each process:", [round(more / MIB, 1) for more in grown.values()])
    assert max(grown.values()) < GROWTH_BYTES
    assert [worker["restarts"] for worker in cluster.status()["workers"]] == [0, 0]
    cluster.assert_conserved()
    with cluster.client() as client:
        usage = client.completions.create(model="tiny", prompt="x", max_tokens=4).usage
    assert usage is not None
    assert usage.completion_tokens > 0
    logs = list(cluster.log.parent.rglob("*.log"))
    assert len(logs) > len(workers)
    assert [log.name for log in logs if "Traceback" in log.read_text()] == []
    with grpc.insecure_channel(admin) as channel:
        shutdown = ADMIN_SERVICE.methods_by_name["Shutdown"]
        for name in OBEYED:
            obeyed: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/tandem.v1.Cluster/{name}")
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                obeyed(b"\xff")
        for name in (
            "Scale",
            "DrainWorker",
            "RestartWorkers",
            "Apply",
        ):  # of models, workers and fields that there are not
            unknown = call(channel, ADMIN_SERVICE.methods_by_name[name], [b"\n\x01?"])
            assert unknown is grpc.StatusCode.FAILED_PRECONDITION
        assert call(channel, shutdown, [b""]) is grpc.StatusCode.OK
    assert cluster.process.wait(120) == 0
