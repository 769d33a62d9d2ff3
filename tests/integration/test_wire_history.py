"""Today's code and what the releases before it said (tests/data/wire, by scripts/record-wire.py), in both roles."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import msgspec
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-not-found]

from cluster.control.admin_service import AdminService
from cluster.control.directory import Directory
from cluster.testing.live import workers
from kvtransfer import control
from kvtransfer.connection.data_socket import TOKEN_BYTES
from kvtransfer.connection.handshake import Welcome
from kvtransfer.control import OpenReceive, Received
from kvtransfer.session.piece import HEADER_BYTES, FrameType, Header
from kvtransfer.session.ticket import Ticket
from kvtransfer.testing.worker import FakeKv, FakeModel, FakeWorker
from router.testing.stub_worker import until
from router.workers.directory import DirectoryFollower
from router.workers.link import WorkerLink
from tandem.config.engine import EngineSpec
from tandem.config.model import ModelSpec, Role
from tandem.config.transfer import TransferSpec
from tandem.rpc.versions import CONTROL_VERSIONS, common_version
from tandem.testing.fork import ForkServer
from tandem.testing.models import write_tiny_llama
from tandem.v1 import cluster_pb2, inference_pb2, trace_pb2, worker_pb2
from worker.registration import Registration

WIRE = Path(__file__).parents[1] / "data" / "wire"
TODAY = {
    name: descriptor
    for module in (inference_pb2, worker_pb2, trace_pb2, cluster_pb2)
    for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
}
RANK_MODULE = "cluster.backends.rank_process"
WAIT_S = 30.0
LENGTH_BYTES = 4


@dataclass(frozen=True)
class Said:
    by: str
    type: str
    raw: bytes


class Release:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.descriptors = FileDescriptorSet.FromString((folder / "descriptors.binpb").read_bytes())
        self.link: dict[str, Any] = json.loads((folder / "link.json").read_text())

    @cached_property
    def pool(self) -> descriptor_pool.DescriptorPool:
        pool = descriptor_pool.DescriptorPool()
        for file in self.descriptors.file:
            pool.Add(file)  # type: ignore[no-untyped-call]
        return pool

    def message(self, name: str) -> type[Message]:
        """As this release generated it."""
        found: Any = self.pool
        return message_factory.GetMessageClass(found.FindMessageTypeByName(name))

    def said(self, conversation: str, kind: str = "", by: str = "") -> list[Said]:
        lines = map(json.loads, (self._folder / f"{conversation}.jsonl").read_text().splitlines())
        every = [Said(line["by"], line["type"], b64decode(line["base64"])) for line in lines]
        return [each for each in every if each.type.endswith(kind) and by in each.by]

    def router_frames(self) -> list[worker_pb2.RouterFrame]:
        return [worker_pb2.RouterFrame.FromString(said.raw) for said in self.said("router-worker", "RouterFrame")]

    def worker_frames(self) -> list[worker_pb2.WorkerFrame]:
        return [worker_pb2.WorkerFrame.FromString(said.raw) for said in self.said("router-worker", "WorkerFrame")]


@pytest.fixture(params=sorted(folder.name for folder in WIRE.iterdir()))
def release(request: pytest.FixtureRequest) -> Release:
    return Release(WIRE / request.param)


def today(name: str) -> type[Message]:
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))  # type: ignore[no-untyped-call]


# ---- descriptors


def changes(kept: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """What a peer of the kept release would misread: a number that means another thing, and a call that is gone."""
    found, messages, calls = [], dict(messages_of(now)), set(calls_of(now))
    for name, message in messages_of(kept):
        if name not in messages:
            found.append(f"{name} is gone")
            continue
        fields = {field.number: field for field in messages[name].field}
        gone = {number for each in messages[name].reserved_range for number in range(each.start, each.end)}
        for field in message.field:
            other = fields.get(field.number)
            if other is None and field.number not in gone:
                found.append(f"{name}.{field.name}: number {field.number} is neither used nor reserved")
            elif other is not None and meaning(field) != meaning(other):
                found.append(f"{name}.{field.name} = {field.number} is {other.name} now, or of another type")
    values = dict(enums_of(now))
    found += [f"{name} has other values" for name, kept_values in enums_of(kept) if not kept_values <= values[name]]
    return found + [f"{call} is gone or takes another message" for call in calls_of(kept) if call not in calls]


def meaning(field: FieldDescriptorProto) -> tuple[Any, ...]:
    return field.name, field.type, field.label, field.type_name, field.proto3_optional, field.HasField("oneof_index")


def messages_of(files: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    for file in files.file:
        for message in file.message_type:
            yield message.name, message
            yield from ((f"{message.name}.{inside.name}", inside) for inside in message.nested_type)


def enums_of(files: FileDescriptorSet) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    for file in files.file:
        for enum in file.enum_type:
            yield enum.name, {(value.name, value.number) for value in enum.value}


def calls_of(files: FileDescriptorSet) -> Iterator[tuple[Any, ...]]:
    for file in files.file:
        for service in file.service:
            for call in service.method:
                yield (
                    f"{service.name}.{call.name}", call.input_type, call.output_type,
                    call.client_streaming, call.server_streaming,
                )  # fmt: skip


def descriptors_of_today() -> FileDescriptorSet:
    files = FileDescriptorSet()
    for module in (inference_pb2, worker_pb2, trace_pb2, cluster_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


@pytest.mark.acceptance(28, here="the recordings of every release before, in both roles")
def test_no_number_of_an_earlier_release_means_another_thing_now(release: Release) -> None:
    assert changes(release.descriptors, descriptors_of_today()) == []


def field_named(files: FileDescriptorSet, message: str, name: str) -> FieldDescriptorProto:
    return next(field for field in dict(messages_of(files))[message].field if field.name == name)


def test_a_changed_number_type_or_name_a_lost_field_and_a_lost_call_are_noticed() -> None:
    now = descriptors_of_today()
    for name, value in (("number", 99), ("type", 9), ("label", 3), ("name", "other")):
        changed = FileDescriptorSet.FromString(now.SerializeToString())
        setattr(field_named(changed, "StepToken", "token_id"), name, value)
        assert len(changes(now, changed)) == 1, name
    less = FileDescriptorSet.FromString(now.SerializeToString())
    del dict(messages_of(less))["StepToken"].field[1]
    assert len(changes(now, less)) == 1
    dict(messages_of(less))["StepToken"].reserved_range.add(start=2, end=3)
    assert changes(now, less) == []
    del next(service for file in less.file for service in file.service if service.name == "Cluster").method[0]
    assert len(changes(now, less)) == 1


# ---- bytes


def as_dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def test_every_recorded_message_reads_as_it_was_meant(release: Release) -> None:
    every = [*release.said("router-worker"), *release.said("control")]
    for said in every:
        now = today(said.type).FromString(said.raw)
        assert as_dict(now) == as_dict(release.message(said.type).FromString(said.raw))
        assert not len(UnknownFieldSet(now))
    assert {said.type.rpartition(".")[2] for said in every} >= {
        "RouterFrame", "WorkerFrame", "RegisterRequest", "RegisterResponse", "WatchDirectoryRequest", "Directory",
        "ScaleRequest", "ScaleResponse", "DrainWorkerRequest", "GetStatusRequest", "ClusterStatus",
    }  # fmt: skip
    spoken = {frame.WhichOneof("frame") for each in release.router_frames() for frame in (each, *each.more)}
    assert spoken >= {"hello", "reserve", "prefill", "join", "generate", "cancel", "hold", "move"}


def filled(kind: Descriptor, depth: int = 4) -> Message:
    """A message with every field set; of a oneof, the last."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        fill(message, field, depth)
    return message


def fill(message: Message, field: FieldDescriptor, depth: int) -> None:
    place = getattr(message, field.name)
    inside = field.message_type
    if inside is None:
        value: Any = "x" if field.type == FieldDescriptor.TYPE_STRING else 1
        value = b"x" if field.type == FieldDescriptor.TYPE_BYTES else value
        if field.is_repeated:
            place.append(value)
        else:
            setattr(message, field.name, value)
    elif inside.GetOptions().map_entry:
        key = "x" if inside.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING else 1
        kept = inside.fields_by_name["value"]
        if kept.message_type is None:
            place[key] = "x" if kept.type == FieldDescriptor.TYPE_STRING else 1
    elif depth:
        (place.add() if field.is_repeated else place).MergeFrom(filled(inside, depth - 1))


def is_within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(name in whole and is_within(value, whole[name]) for name, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(is_within, part, whole))
    return bool(part == whole)


def test_an_earlier_release_reads_every_field_it_knows_and_keeps_the_others(release: Release) -> None:
    for name in {message.name for file in release.descriptors.file for message in file.message_type} & set(TODAY):
        message = filled(TODAY[name])
        read = release.message(f"tandem.v1.{name}").FromString(message.SerializeToString())
        assert message.FromString(read.SerializeToString()) == message
        known = as_dict(read)
        assert is_within(known, as_dict(message))
        alone = [field for field in read.DESCRIPTOR.fields if field.containing_oneof is None]
        assert {field.name for field in alone if field.message_type is None} <= set(known)


# ---- roles


class Sink:
    """A request on a link. Notes what comes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def on_token(self, link: WorkerLink, token: worker_pb2.StepToken, now_s: float) -> None:
        self.tokens.append(token.token_id)

    def on_ended(self, link: WorkerLink, ended: worker_pb2.Ended) -> None:
        self.ended = True

    def __getattr__(self, name: str) -> Any:
        return lambda *ignored, **named: None


class Listener:
    def link_changed(self, link: WorkerLink) -> None: ...

    def load_changed(self, link: WorkerLink) -> None: ...

    def work_began(self, link: WorkerLink) -> None: ...


@asynccontextmanager
async def answering(service: str, calls: dict[str, Any]) -> AsyncIterator[str]:
    """A server of bytes, and its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_routers_link_takes_the_frames_of_an_earlier_worker(release: Release) -> None:
    frames = release.worker_frames()
    first = next(frame for frame in frames if frame.HasField("hello"))
    later = [frame for frame in frames if not frame.HasField("hello")]
    ids = {token.request_id for frame in later for token in frame.tokens}
    ids |= {each.request_id for frame in later for each in frame.ended}
    expected: dict[str, list[int]] = {each: [] for each in ids}
    ended: set[str] = set()
    for frame in later:
        for token in frame.tokens:
            if token.request_id not in ended:
                expected[token.request_id].append(token.token_id)
        ended |= {each.request_id for each in frame.ended}
    came = list[Any]()
    attached = asyncio.Event()

    async def session(sent: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        came.append(release.message("tandem.v1.RouterFrame").FromString(await anext(aiter(sent))))
        yield first.SerializeToString()
        await attached.wait()
        for frame in later:
            yield frame.SerializeToString()
        await asyncio.Event().wait()

    calls: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(session)}
    async with answering("tandem.v1.Worker", calls) as address:
        info = cluster_pb2.WorkerInfo(worker_id=first.hello.worker_id, epoch=first.hello.epoch, address=address)
        link = WorkerLink(info, "router-0", Listener())
        link.start()
        await until(lambda: link.ready)
        sinks = {each: Sink() for each in ids}
        for each, sink in sinks.items():
            link.attach(each, cast(Any, sink))
        attached.set()
        await until(lambda: link.seen_frames == max(frame.frames_seen for frame in later))
        await until(lambda: {each for each, sink in sinks.items() if sink.ended} == ended)
        assert link.ready
        await link.close()
    assert {each: sink.tokens for each, sink in sinks.items()} == expected
    assert sum(map(len, expected.values())) > 5
    assert came[0].hello.protocol == first.hello.protocol  # which earlier workers demand


def vocabulary_model(folder: Path) -> ModelSpec:
    """As in the recording."""
    source = write_tiny_llama(folder / "tiny", vocab=300, seed=1, scale=2.0)
    return ModelSpec(source=str(source), engine=EngineSpec(kv_blocks=200, max_step_tokens=64))


async def test_a_worker_serves_the_frames_of_an_earlier_router(
    release: Release, short_folder: Path, forks: ForkServer, tmp_path: Path
) -> None:
    """Each request that it is asked for is reserved or answered, and none of them breaks the session."""
    frames = release.router_frames()
    flat = [frame for each in frames for frame in (each, *each.more)]
    reserved = {frame.reserve.work.request_id for frame in flat if frame.HasField("reserve")}
    generated = {frame.generate.work.request_id for frame in flat if frame.HasField("generate")}
    answered = set[str]()
    async with workers(short_folder, RANK_MODULE, forks=forks) as running:
        info = await running.start("decode-0", Role.DECODE, vocabulary_model(tmp_path), TransferSpec())
        async with grpc.aio.insecure_channel(info.address) as channel:
            call: Any = channel.stream_stream("/tandem.v1.Worker/Session")()
            hello = next(said.raw for said in release.said("router-worker", "RouterFrame") if is_hello(said.raw))
            await call.write(hello)
            others = [said.raw for said in release.said("router-worker", "RouterFrame") if not is_hello(said.raw)]
            # A cancel, a hold and a move are of requests that this worker has not: they follow, and end nothing else.
            for raw in others:
                await call.write(raw)
            earlier = release.message("tandem.v1.WorkerFrame")
            async with asyncio.timeout(WAIT_S):
                while not reserved | generated <= answered:
                    frame: Any = earlier.FromString(await call.read())
                    answered |= {each.request_id for each in (*frame.reserved, *frame.tokens, *frame.ended)}
            call.cancel()


def is_hello(raw: bytes) -> bool:
    return worker_pb2.RouterFrame.FromString(raw).WhichOneof("frame") == "hello"


async def test_the_controller_takes_what_earlier_workers_routers_and_admins_ask(release: Release) -> None:
    calls = list[tuple[Any, ...]]()
    directory = Directory()

    def register(info: cluster_pb2.WorkerInfo, versions: Any) -> None:
        common_version(CONTROL_VERSIONS, versions)
        directory.put(info)
        calls.append(("register", info.worker_id))

    async def scale(*asked: Any) -> list[str]:
        calls.append(("scale", *asked))
        return []

    async def drain(worker_id: str, **how: Any) -> None:
        calls.append(("drain", worker_id, how))

    service = AdminService(
        workers=cast(Any, SimpleNamespace(register=register, directory=directory)),
        routers=cast(Any, None),
        scaler=cast(Any, SimpleNamespace(scale=scale, drain=drain)),
        restart=cast(Any, None),
        applier=cast(Any, None),
        status=cast(Any, None),
        stop_requested=asyncio.Event(),
    )
    context = cast(Any, None)
    for said in release.said("control", "Request"):
        match request := today(said.type).FromString(said.raw):
            case cluster_pb2.RegisterRequest():
                answer = await service.Register(request, context)
                release.message("tandem.v1.RegisterResponse").FromString(answer.SerializeToString())
            case cluster_pb2.WatchDirectoryRequest():
                if calls:
                    found = await anext(aiter(service.WatchDirectory(request, context)))
                    read: Any = release.message("tandem.v1.Directory").FromString(found.SerializeToString())
                    assert [worker.worker_id for worker in read.workers]
            case cluster_pb2.ScaleRequest():
                await service.Scale(request, context)
            case cluster_pb2.DrainWorkerRequest():
                await service.DrainWorker(request, context)
    assert {call[0] for call in calls} == {"register", "scale", "drain"}
    assert ("scale", "tiny", 1, 1) in calls
    assert ("drain", "decode-1", {"restart": True, "move": True}) in calls


async def test_workers_and_routers_follow_an_earlier_controller(release: Release) -> None:
    """Of its directories the whole ones: the recording has changes of several streams."""
    every = [said.raw for said in release.said("control", "Directory")]
    directories = [raw for raw in every if not cluster_pb2.Directory.FromString(raw).base_version]
    register = release.said("control", "RegisterRequest")[0]
    own = cluster_pb2.RegisterRequest.FromString(register.raw).worker
    asked = list[Any]()

    async def take(raw: bytes, context: Any) -> bytes:
        asked.append(release.message("tandem.v1.RegisterRequest").FromString(raw))
        return release.said("control", "RegisterResponse")[0].raw

    async def watch(raw: bytes, context: Any) -> AsyncIterator[bytes]:
        for each in directories:
            yield each
        await asyncio.Event().wait()

    calls: dict[str, Any] = {
        "Register": grpc.unary_unary_rpc_method_handler(take),
        "WatchDirectory": grpc.unary_stream_rpc_method_handler(watch),
    }
    peers, followed = list[Any](), list[cluster_pb2.Directory]()
    async with answering("tandem.v1.Cluster", calls) as address:
        launch = cast(Any, SimpleNamespace(controller_address=address, worker_id=own.worker_id))
        registering = asyncio.create_task(Registration(launch, own, peers.append, lambda adapters: None).run())
        follower = DirectoryFollower(address, "router-0", followed.append)
        follower.start()
        await until(lambda: len(peers) == len(followed) == len(directories))
        await follower.close()
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)
    assert asked[0].worker.worker_id == own.worker_id
    assert [each.SerializeToString(deterministic=True) for each in followed] == directories
    assert any(peer.tcp_address for each in peers for peer in each)


# ---- agents


def test_every_recorded_message_of_an_agent_is_decoded_and_loses_nothing(release: Release) -> None:
    either = msgspec.msgpack.Decoder(control.ToAgent | control.FromAgent)
    every = release.said("agent")
    for said in every:
        message = either.decode(said.raw)
        assert type(message).__name__ == said.type
        assert is_within(msgspec.msgpack.decode(said.raw), msgspec.msgpack.decode(msgspec.msgpack.encode(message)))
    assert {said.type for said in every} >= {"AttachPool", "SetPeers", "OpenReceive", "OpenSend", "Received", "Sent"}


def framed(raw: bytes) -> Iterator[tuple[Header, bytes]]:
    while raw:
        header = Header.unpack(raw[:HEADER_BYTES])
        end = HEADER_BYTES + header.body_bytes
        yield header, raw[:end]
        raw = raw[end:]


def first_and_frames(raw: bytes) -> tuple[bytes, bytes]:
    """The hello or its answer, with its length, and the frames behind it."""
    end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    return raw[:end], raw[end:]


class Replies:
    """What a receiving agent sends on its link."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.kinds = list[FrameType]()

    async def wait_for(self, kind: FrameType, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.kinds.count(kind) < count:
                header = Header.unpack(await self._reader.readexactly(HEADER_BYTES))
                await self._reader.readexactly(header.body_bytes)
                self.kinds.append(header.type)


async def test_an_agent_takes_a_handoff_of_an_earlier_agent(release: Release, tmp_path: Path) -> None:
    """The recorded sender's bytes fill the blocks of a real receiver, which answers as the recorded one did."""
    link, model = release.link, FakeModel(kv_heads=2)
    hello, frames = first_and_frames(b64decode(link["sender"]))
    welcome_then, answers_then = first_and_frames(b64decode(link["receiver"]))
    data = b64decode(link["data"])
    decode = FakeWorker(tmp_path, "decode-0", model, transport="tcp")
    decode.epoch, decode.key = link["epochs"]["decode"], b64decode(link["key"])
    async with AsyncExitStack() as opened:
        opened.callback(decode.stop)
        await decode.attach()
        host, _, port = decode.attached[0].tcp_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        opened.callback(writer.close)
        writer.write(hello)
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        body = await reader.readexactly(length)
        assert set(msgspec.msgpack.decode(welcome_then[LENGTH_BYTES:])) <= set(msgspec.msgpack.decode(body))
        welcome = msgspec.msgpack.decode(body, type=Welcome)
        _, data_writer = await asyncio.open_connection(host, welcome.data_port)
        opened.callback(data_writer.close)
        data_writer.write(welcome.data_token + data[TOKEN_BYTES:])

        [signed] = [raw[HEADER_BYTES:] for header, raw in framed(frames) if header.type is FrameType.OPEN]
        ticket = Ticket.verify(decode.key, signed)
        lease = OpenReceive(
            ticket.ticket_id, ticket.prefill_worker, ticket.prefill_epoch, ticket.first_block,
            tuple(link["block_ids"]), ticket.prompt_tokens,
        )  # fmt: skip
        decode.ranks[0].send_as_leader(lease)
        replies, pieces = Replies(reader), 0
        for header, raw in framed(frames):
            if header.type is FrameType.PIECE:
                await replies.wait_for(FrameType.ACCEPT, 1)
                pieces += 1
            elif header.type is FrameType.FINISH:
                await replies.wait_for(FrameType.ACK, pieces)
            writer.write(raw)
        received = await decode.ranks[0].expect(Received)
        assert received.ticket_id == ticket.ticket_id
        assert decode.ranks[0].holds(FakeKv(model, link["tokens"]), link["block_ids"])
    assert set(replies.kinds) - {FrameType.HEARTBEAT} == {
        header.type for header, _ in framed(answers_then) if header.type is not FrameType.HEARTBEAT
    }
