"""Malicious clients in a separate process:

    python -m router.testing.hostile ATTACK HTTP_PORT GRPC_PORT MODEL N

Starts the attack and prints the number of open connections as a line of JSON. Then holds them until a line comes on
stdin, and prints how many of them the router had closed. `Attack` starts such a process and reads its output.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections.abc import Awaitable, Callable

import grpc

from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub

HOST = "127.0.0.1"
AT_ONCE = 48
STORM_AT_ONCE = 16  # about 100 requests per second
PATIENCE_S = 600.0
LONG_S = 0.3  # shorter than an answer of the stub workers
STREAM: dict[str, object] = {"prompt": "x", "stream": True, "max_tokens": 1500}  # `main` adds the model
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Attack:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the attack has no pipes")
        self._process, self._input, self._output = process, process.stdin, process.stdout

    @classmethod
    async def begin(cls, name: str, ports: tuple[int, int], model: str, count: int, nice: int = 0) -> Attack:
        """Starts a process. `ports`: HTTP and gRPC. `nice`: its niceness, to leave the cores to the router."""
        command = ["nice", "-n", f"{nice}", sys.executable, "-m", "router.testing.hostile"]
        pipe = asyncio.subprocess.PIPE
        about = (name, *map(str, ports), model, f"{count}")
        return cls(await asyncio.create_subprocess_exec(*command, *about, stdin=pipe, stdout=pipe))

    async def made(self) -> int:
        """Waits until the attack is running; returns the number of its open connections."""
        return await self._read_count("made")

    async def end(self) -> int:
        """Ends the attack; returns how many of its connections the router had closed."""
        self._input.write(b"\n")
        closed = await self._read_count("closed")
        await self._process.wait()
        return closed

    async def drop(self) -> None:
        """Kills the process with all its connections."""
        self._process.kill()
        await self._process.wait()

    async def _read_count(self, key: str) -> int:
        async with asyncio.timeout(PATIENCE_S):
            line = await self._output.readline()
        return int(json.loads(line)[key])


def http_request(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


async def cancel_storm(http_port: int, grpc_port: int, count: int) -> list[Connection]:
    """Requests dropped at random moments: in the head, the body, the queue, the prefill or the answer."""
    room, dice = asyncio.Semaphore(STORM_AT_ONCE), random.Random(0)
    channel = grpc.aio.insecure_channel(f"{HOST}:{grpc_port}")
    stub = InferenceStub(channel)

    async def by_http() -> None:
        _, writer = await asyncio.open_connection(HOST, http_port)
        request = http_request(STREAM)
        if dice.random() < 0.2:
            request = request[: dice.randrange(len(request))]
        if dice.random() < 0.5:  # TCP reset instead of FIN
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write(request)
        await asyncio.sleep(dice.random() * LONG_S)
        writer.transport.abort()

    async def by_grpc() -> None:
        call = stub.Generate(pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=1500)))
        await asyncio.sleep(dice.random() * LONG_S)
        call.cancel()

    async def one(number: int) -> None:
        async with room:
            await (by_grpc() if number % 3 == 0 else by_http())

    await asyncio.gather(*(one(number) for number in range(count)))
    await channel.close()
    return []


async def slow_readers(http_port: int, grpc_port: int, count: int) -> list[Connection]:
    """Clients that request long answers and read nothing; a quarter by gRPC."""
    request = http_request(STREAM | {"logprobs": 20})

    async def one() -> Connection:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (HOST, http_port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # socket transports have it
        writer.write(request)
        return reader, writer

    return await _all(one, count - count // 4) + [await _windowless(grpc_port, count // 4)]


async def _windowless(grpc_port: int, count: int) -> Connection:
    """Calls whose answers cannot be sent: the flow-control window of each stream stays 0."""
    reader, writer = await asyncio.open_connection(HOST, grpc_port)
    no_window = struct.pack(">HI", 4, 0)
    writer.write(_PREFACE + _frame(4, 0, 0, no_window) + _frame(4, 1, 0, b""))
    writer.write(b"".join(_call(2 * number + 1) for number in range(count)))
    await writer.drain()
    return reader, writer


async def readers(http_port: int, grpc_port: int, count: int) -> list[Connection]:
    """Harmless: the requests of `slow_readers`, all by HTTP, with their answers read."""
    request = http_request(STREAM | {"logprobs": 20})

    async def one() -> Connection:
        reader, writer = await asyncio.open_connection(HOST, http_port)
        writer.write(request)
        _TASKS.append(asyncio.create_task(_read_all(reader)))
        return reader, writer

    return await _all(one, count)


async def _read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


_TASKS: list[asyncio.Task[None]] = []


async def idle(http_port: int, grpc_port: int, count: int) -> list[Connection]:
    """Idle connections: half never send, half send one request; a tenth is on the gRPC port."""

    async def silent() -> Connection:
        return await asyncio.open_connection(HOST, http_port)

    async def after_one() -> Connection:
        reader, writer = await asyncio.open_connection(HOST, http_port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer

    async def silent_grpc() -> Connection:
        return await asyncio.open_connection(HOST, grpc_port)

    made = await _all(silent, count * 9 // 20) + await _all(after_one, count * 9 // 20)
    return made + await _all(silent_grpc, count // 10)


async def slowloris(http_port: int, grpc_port: int, count: int) -> list[Connection]:
    """Requests whose head or body never ends."""

    async def one(begin: bytes, more: bytes) -> Connection:
        reader, writer = await asyncio.open_connection(HOST, http_port)
        writer.write(begin)

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(more)
                await asyncio.sleep(0.1)

        _TASKS.append(asyncio.create_task(drip()))
        return reader, writer

    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    heads = await _all(lambda: one(head, b"a: b\r\n"), count // 2)
    bodies = await _all(lambda: one(head + b"content-length: 4000\r\n\r\n{", b" "), count // 4)
    chunks = await _all(lambda: one(head + b"transfer-encoding: chunked\r\n\r\n1\r\n{", b"\r\n1\r\n "), count // 4)
    return heads + bodies + chunks


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """A literal header field without indexing or Huffman coding (RFC 7541, section 6.2.2)."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _call(stream: int) -> bytes:
    """The frames of a whole request for a long answer."""
    head = b"".join(_header(*each) for each in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/tandem.v1.Inference/Generate"),
        (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"),
    ))  # fmt: skip
    message = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=1500)).SerializeToString()
    data = b"\0" + struct.pack(">I", len(message)) + message
    return _frame(1, 4, stream, head) + _frame(0, 1, stream, data)


async def rapid_reset(http_port: int, grpc_port: int, count: int) -> list[Connection]:
    """CVE-2023-44487: streams that are reset right after they open."""
    made = []
    for _ in range(4):
        reader, writer = await asyncio.open_connection(HOST, grpc_port)
        made.append((reader, writer))
        writer.write(_PREFACE + _frame(4, 0, 0, b""))
        for number in range(count // 4):
            stream = 2 * number + 1
            writer.write(_call(stream) + _frame(3, 0, stream, struct.pack(">I", 8)))
            if number % 50 == 49:
                try:
                    await writer.drain()
                except ConnectionError:
                    break  # the router may close such a connection
    return made


async def _all(one: Callable[[], Awaitable[Connection]], count: int) -> list[Connection]:
    room = asyncio.Semaphore(AT_ONCE)

    async def bounded() -> Connection:
        async with room:
            return await one()

    return await asyncio.gather(*(bounded() for _ in range(count)))


async def _is_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Reads everything sent so far, up to the end of the stream."""
    try:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        while True:
            async with asyncio.timeout(1.0):
                if not await reader.read(1 << 16):
                    return True
    except TimeoutError:
        return False
    except OSError:
        return True


ATTACKS = {each.__name__: each for each in (cancel_storm, slow_readers, readers, idle, slowloris, rapid_reset)}


async def main(attack: str, http_port: int, grpc_port: int, model: str, count: int) -> None:
    STREAM["model"] = model
    made = await ATTACKS[attack](http_port, grpc_port, count)
    print(json.dumps({"made": len(made)}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in _TASKS:
        task.cancel()
    closed = await asyncio.gather(*(_is_closed(*each) for each in made))
    print(json.dumps({"closed": sum(closed)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
