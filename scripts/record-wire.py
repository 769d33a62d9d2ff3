"""Records what the parts of the installed release say to each other, as bytes, and the descriptors of its messages.

    python scripts/record-wire.py tests/data/wire/VERSION

Run once for each release, before its tag. tests/integration/test_wire_history.py replays every recording against
today's code, so a recording is never changed. It starts a small cluster and two transfer agents.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import openai
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message

from cluster.control.admin_service import AdminService
from cluster.testing.running import controller_of
from kvtransfer.connection.handshake import Welcome
from kvtransfer.control import CloseReceive, CloseSend, ReceiveClosed, Received, SendClosed, Sent, SetPeers
from kvtransfer.testing.handoff import Handoff
from kvtransfer.testing.worker import FakeModel, FakeRank, FakeWorker
from tandem.rpc.channel import encode
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, trace_pb2, worker_pb2

OF_A_KIND = 2  # messages with the same fields that are kept
LENGTH_BYTES = 4  # before the first message of a link
SESSION = "/tandem.v1.Worker/Session"


class Recorder:
    """Keeps the first messages of every kind: same sender, type and fields."""

    def __init__(self) -> None:
        self.lines: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        self._seen: Counter[tuple[str, ...]] = Counter()

    def note(self, conversation: str, by: str, message: Message) -> None:
        name = message.DESCRIPTOR.full_name
        self._seen[kind := (conversation, by.rstrip("0123456789"), name, *fields_of(message))] += 1
        if self._seen[kind] <= OF_A_KIND:
            self._add(conversation, by, name, message.SerializeToString(deterministic=True))

    def note_struct(self, conversation: str, by: str, struct: msgspec.Struct) -> None:
        self._add(conversation, by, type(struct).__name__, msgspec.msgpack.encode(struct))

    def _add(self, conversation: str, by: str, kind: str, raw: bytes) -> None:
        self.lines[conversation].append({"by": by, "type": kind, "base64": b64encode(raw).decode()})

    def write(self, folder: Path) -> None:
        for conversation, lines in self.lines.items():
            (folder / f"{conversation}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fields_of(message: Message) -> Iterable[str]:
    """Names of the fields that are set, those of messages inside included."""
    for field, value in message.ListFields():
        yield field.name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            inside = list(value) if field.is_repeated else [value]
            yield from sorted({name for each in inside for name in fields_of(each)})


def descriptors() -> bytes:
    files = []
    for module in (inference_pb2, worker_pb2, trace_pb2, cluster_pb2):
        module.DESCRIPTOR.CopyToProto(proto := FileDescriptorProto())
        files.append(proto)
    return FileDescriptorSet(file=files).SerializeToString(deterministic=True)


class WorkerProxy(grpc.GenericRpcHandler):
    """Stands between a router and a worker."""

    def __init__(self, recorder: Recorder, address: str) -> None:
        self._recorder = recorder
        self._session: Any = grpc.aio.insecure_channel(address).stream_stream(SESSION)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._relay) if details.method == SESSION else None

    async def _relay(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for raw in self._session(self._noted("router", frames, worker_pb2.RouterFrame)):
            self._recorder.note("router-worker", "worker", worker_pb2.WorkerFrame.FromString(raw))
            yield raw

    async def _noted(self, by: str, frames: AsyncIterator[bytes], kind: type[Message]) -> AsyncIterator[bytes]:
        async for raw in frames:
            self._recorder.note("router-worker", by, kind.FromString(raw))
            yield raw


class Cluster:
    """A small cluster whose routers reach the workers through proxies, and whose admin calls are noted."""

    def __init__(self, recorder: Recorder, folder: Path) -> None:
        source = str(write_tiny_llama(folder / "tiny", vocab=300, seed=1, scale=2.0))
        engine = {"kv_blocks": 200, "max_step_tokens": 64}
        model = {"source": source, "decode": {"workers": 2}, "engine": engine}
        self.controller = controller_of({"models": [model], "router": {"disaggregation": "always"}}, folder)
        self._recorder = recorder
        self._proxies: dict[str, WorkerProxy] = {}
        self._note_admin_calls()

    def _note_admin_calls(self) -> None:
        register, watch = AdminService.Register, AdminService.WatchDirectory

        async def noted_register(service: Any, request: Any, context: Any) -> Any:
            self._recorder.note("control", "worker", request)
            answer = await register(service, request, context)
            self._recorder.note("control", "controller", answer)
            return answer

        async def noted_watch(service: Any, request: Any, context: Any) -> Any:
            by = "router" if "router" in request.watcher else "worker"
            self._recorder.note("control", by, request)
            async for directory in watch(service, request, context):
                self._recorder.note("control", "controller", directory)
                yield await self._through_proxies(directory) if by == "router" else directory

        service: Any = AdminService
        service.Register = noted_register
        service.WatchDirectory = noted_watch

    async def _through_proxies(self, directory: cluster_pb2.Directory) -> cluster_pb2.Directory:
        changed = cluster_pb2.Directory.FromString(directory.SerializeToString())
        for worker in changed.workers:
            if worker.address not in self._proxies:
                proxy = self._proxies[worker.address] = WorkerProxy(self._recorder, worker.address)
                await proxy.start()
            worker.address = self._proxies[worker.address].address
        return changed

    async def call(self, method: str, request: Message) -> None:
        async with grpc.aio.insecure_channel(self.controller.admin_address) as channel:
            self._recorder.note("control", "admin", request)
            answer = await getattr(cluster_pb2_grpc.ClusterStub(channel), method)(request)
            self._recorder.note("control", "controller", answer)

    async def use(self) -> None:
        """Answers of every kind of sampling, one that is cancelled, some that move; a drain, and scales."""
        async with self._client() as client:
            prompts = [random_prompt(40 + 30 * n, 300, n) for n in range(4)]
            plain: dict[str, Any] = {"model": "tiny", "max_tokens": 6}
            rich: dict[str, Any] = {
                "logprobs": 2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "logit_bias": {"7": 1},
                "seed": 3,
            }
            await client.completions.create(prompt=prompts[0], **plain)
            await client.completions.create(prompt=prompts[0], **plain)  # from the cache
            await client.completions.create(prompt=prompts[1], **plain, **rich)
            await client.completions.create(
                prompt=prompts[2], **plain, stop=["zz"], extra_body={"echo": True, "logprobs": 1, "top_k": 4}
            )
            cut = await client.completions.create(prompt=prompts[3], model="tiny", max_tokens=400, stream=True)
            await anext(aiter(cut))
            await cut.close()
            answers = [
                aiter(await client.completions.create(prompt=each, model="tiny", max_tokens=400, stream=True))
                for each in prompts
            ]
            for answer in answers:
                await anext(answer)
            await self.call("DrainWorker", cluster_pb2.DrainWorkerRequest(worker_id="decode-1", restart=True))
            for answer in answers:
                async for _ in answer:
                    pass
        await self.controller.wait_ready(lambda what: None)
        await self.call("GetStatus", cluster_pb2.GetStatusRequest())
        await self.call("ListTraces", trace_pb2.ListTracesRequest(limit=2))
        await self.call("ListSnapshots", cluster_pb2.ListSnapshotsRequest())
        await self.call("Scale", cluster_pb2.ScaleRequest(model="tiny", prefill=1, decode=1))
        await self.call("Scale", cluster_pb2.ScaleRequest(model="tiny", prefill=0))
        async with self._client() as client:
            await client.completions.create(prompt=prompts[1], **plain)  # without a handoff

    def _client(self) -> openai.AsyncOpenAI:
        base = f"http://{self.controller.http_address}/v1"
        return openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)

    async def close(self) -> None:
        for proxy in self._proxies.values():
            await proxy.stop()
        await self.controller.close()


async def record_cluster(recorder: Recorder, folder: Path) -> None:
    cluster = Cluster(recorder, folder)
    try:
        await cluster.controller.start()
        await cluster.controller.wait_ready(print)
        await cluster.use()
    finally:
        await cluster.close()


class StreamProxy:
    """Stands between two agents on TCP. `sent`: per connection, what its opener sent; `answered`: what came back."""

    def __init__(self) -> None:
        self.links: list[tuple[bytearray, bytearray]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> int:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            kept = (bytearray(), bytearray())
            self.links.append(kept)
            self._tasks |= {
                asyncio.create_task(self._pump(reader, forth, kept[0])),
                asyncio.create_task(self._pump(back, writer, kept[1])),
            }

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk if kept else await self._with_data_here(chunk))
            kept += chunk
        writer.close()

    async def _with_data_here(self, first: bytes) -> bytes:
        """A welcome, with the port of a proxy for the data; anything else as it is."""
        try:
            welcome = msgspec.msgpack.decode(first[LENGTH_BYTES:], type=Welcome)
        except msgspec.MsgspecError:
            return first
        assert welcome.data_port is not None
        return encode(msgspec.structs.replace(welcome, data_port=await self.listen(welcome.data_port)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def noted(recorder: Recorder, worker: FakeWorker) -> None:
    """Notes what the worker and its agent say to each other on their socket."""
    rank: FakeRank = worker.ranks[0]
    came, leader, own = rank._on_message, rank.send_as_leader, rank.send_as_rank

    def on_message(message: Any) -> None:
        recorder.note_struct("agent", "agent", message)
        came(message)

    def send(send_on: Callable[[msgspec.Struct], None], message: msgspec.Struct) -> None:
        recorder.note_struct("agent", "worker", message)
        send_on(message)

    rank._on_message = on_message  # type: ignore[method-assign]
    rank.send_as_leader = lambda message: send(leader, message)  # type: ignore[method-assign]
    rank.send_as_rank = lambda message: send(own, message)  # type: ignore[method-assign]
    recorder.note_struct("agent", "worker", rank.attach_message())


async def record_agents(recorder: Recorder, folder: Path) -> dict[str, Any]:
    """One handoff over `tcp`. Returns what the receiver needs to take it again: the link's bytes, the ticket's key."""
    model = FakeModel(kv_heads=2)
    prefill = FakeWorker(folder, "prefill-0", model, transport="tcp", connects=True)
    decode = FakeWorker(folder, "decode-0", model, transport="tcp")
    proxy = StreamProxy()
    try:
        for worker in (prefill, decode):
            noted(recorder, worker)
            await worker.attach()
        port = await proxy.listen(int(decode.attached[0].tcp_address.rpartition(":")[2]))
        [peer] = decode.peers()
        prefill.ranks[0].send_as_leader(
            SetPeers((msgspec.structs.replace(peer, tcp_address=f"127.0.0.1:{port}", mapped_path=""),))
        )
        decode.set_peers_of(prefill)
        await prefill.linked()
        handoff = Handoff.make(prefill, decode, tokens=10)
        handoff.open_receive()
        handoff.open_send()
        handoff.compute(0, handoff.kv.blocks)
        await prefill.ranks[0].expect(Sent)
        await decode.ranks[0].expect(Received)
        assert handoff.arrived()
        prefill.ranks[0].send_as_leader(CloseSend(handoff.ticket_id))
        decode.ranks[0].send_as_leader(CloseReceive(handoff.ticket_id))
        await prefill.ranks[0].expect(SendClosed)
        await decode.ranks[0].expect(ReceiveClosed)
    finally:
        prefill.stop()
        decode.stop()
        await proxy.close()
    (control, answers), (data, _) = proxy.links[:2]
    return {
        "epochs": {"prefill": prefill.epoch, "decode": decode.epoch},
        "key": b64encode(decode.key).decode(),
        "tokens": handoff.kv.tokens,
        "block_ids": handoff.target_ids,
        "sender": b64encode(control).decode(),
        "receiver": b64encode(answers).decode(),
        "data": b64encode(data).decode(),
    }


async def record(folder: Path) -> None:
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="wire-") as scratch:
        link = await record_agents(recorder, Path(scratch))
        await record_cluster(recorder, Path(scratch))
    recorder.write(folder)
    (folder / "link.json").write_text(json.dumps(link, indent=2) + "\n")
    (folder / "descriptors.binpb").write_bytes(descriptors())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)  # fails where there is a recording: it is never changed
    asyncio.run(record(folder))


if __name__ == "__main__":
    main()
