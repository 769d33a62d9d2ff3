"""A transfer agent with planned faults, for tests: `python -m kvtransfer.testing.agent --faults JSON --socket PATH`.

JSON is a `tandem.testing.models.FaultSettings`. Works with any transport, because the faults are in the link's frames
and in the ends that `Transports` creates. Fault points, each an operation that a plan counts:

    frames, when sent            open piece finish abort probe · accept ack fail aborted probed ·
                                 heartbeat (only if named)
    a piece, before it is sent   digest (its digest changes), memory (mapped: its blocks change after the digest),
                                 blocks (mapped: its block ids are outside the pool)
    the sender's operations      hello connect send_probe push
    the receiver's operations    prepare join fetch place

`--killed-at POINT` kills the agent instead, when it first gets there; the next agent on its socket lives. Points are
also the messages between the agent, its rank and its leader, by their types: before one is sent or handled.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np

from kvtransfer.agent import agent
from kvtransfer.agent.agent import main
from kvtransfer.causes import HandoffCause, HandoffFault
from kvtransfer.connection.handshake import Hello, LocalRank, Welcome
from kvtransfer.connection.stream import FrameStream
from kvtransfer.connection.tls import Wire
from kvtransfer.control import Peer
from kvtransfer.pool.digest import digest_of
from kvtransfer.pool.pool import PoolMap, PoolSpan
from kvtransfer.pool.pools import Pool
from kvtransfer.session.piece import FrameType, Header, Piece
from kvtransfer.session.reshard import PlannedLink
from kvtransfer.transports.factory import Transports
from kvtransfer.transports.protocol import KvReceiver, KvSender, PieceArrival, WelcomeTerms
from kvtransfer.transports.threads import INLINE_BYTES, LinkThread
from tandem.rpc.channel import Channel
from tandem.testing.models import FaultPlan, FaultSettings, OperationFault, OperationFaultKind

T = TypeVar("T")

HANG_S: Final = 3600.0
_ANY_FRAME: Final = tuple(OperationFaultKind)
_OPERATION: Final = (OperationFaultKind.FAIL, OperationFaultKind.DELAY, OperationFaultKind.HANG)
_SETUP: Final = (OperationFaultKind.FAIL, OperationFaultKind.DELAY)


def broken(point: str) -> HandoffFault:
    return HandoffFault(HandoffCause.TRANSPORT, f"fault point: {point} fails")


class FaultyWriter:
    """A stream writer that applies `fault` to the next frame. It keeps the order of frames unless the fault changes
    it."""

    def __init__(self, inner: asyncio.StreamWriter) -> None:
        self.fault: OperationFault | None = None
        self._inner = inner
        self._held: list[bytes] = []
        self._is_hung = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        fault, self.fault = self.fault, None
        if self._is_hung:
            return
        if fault is None:
            self._pass(data)
            return
        match fault.kind:
            case OperationFaultKind.DELAY | OperationFaultKind.REORDER:
                self._hold(data, fault)
            case OperationFaultKind.DUPLICATE:
                self._pass(data)
                self._pass(data)
            case OperationFaultKind.FLIP:
                self._pass(flip(data, fault.number))
            case OperationFaultKind.TRUNCATE:
                self._pass(data[: fault.number % len(data)])
                self._inner.close()
            case OperationFaultKind.FAIL:
                self._inner.transport.abort()
            case OperationFaultKind.HANG:
                self._is_hung = True
            case _:
                pass  # dropped

    def _pass(self, data: bytes) -> None:
        if self._held and self._held[0] == b"":  # a delay, so all later frames wait too
            self._held.append(data)
            return
        self._inner.write(data)
        self._release()

    def _hold(self, data: bytes, fault: OperationFault) -> None:
        if self._held:
            self._held.append(data)
            return
        self._held = [b"", data] if fault.kind is OperationFaultKind.DELAY else [data]
        asyncio.get_running_loop().call_later(fault.delay_s, self._release)

    def _release(self) -> None:
        held, self._held = self._held, []
        if not self._inner.is_closing():
            self._inner.write(b"".join(held))


def flip(data: bytes, number: int) -> bytes:
    bit = number % (8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class FaultyStream(FrameStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: FaultPlan) -> None:
        self._faulty = FaultyWriter(writer)
        super().__init__(reader, cast("asyncio.StreamWriter", self._faulty))
        self._plan = plan
        self.memory: tuple[Pool, PoolSpan] | None = None

    @classmethod
    def around(cls, stream: FrameStream, plan: FaultPlan) -> FaultyStream:
        return cls(stream._reader, stream._writer, plan)

    def send(self, header: Header, body: bytes = b"") -> None:
        if header.type is FrameType.PIECE and header.piece is not None:
            header, body = self._before_piece(header, header.piece, body)
        point = header.type.name.lower()
        fault = None
        if header.type is not FrameType.HEARTBEAT or self._plan.is_at("heartbeat"):
            fault = self._plan.next(point, _ANY_FRAME)
        if fault is not None and fault.kind is OperationFaultKind.MISADDRESS:
            header, body = misaddress(header, body, fault.number)
            fault = None
        self._faulty.fault = fault
        super().send(header, body)

    def _before_piece(self, header: Header, piece: Piece, body: bytes) -> tuple[Header, bytes]:
        if piece.digest is not None and (fault := self._plan.next("digest", (OperationFaultKind.FLIP,))):
            header = replace(header, piece=replace(piece, digest=piece.digest ^ 1 << fault.number % 64))
        copied_first = piece.payload_bytes > INLINE_BYTES  # otherwise both ends would compute the same wrong digest
        if (
            body
            and self.memory
            and not copied_first
            and (fault := self._plan.next("memory", (OperationFaultKind.FLIP,)))
        ):
            flip_in_pool(*self.memory, fault.number)
        if body and self._plan.next("blocks", (OperationFaultKind.MISADDRESS,)):
            body = b"\x00\x00\x00\x7f" * (len(body) // 4)
        return header, body


def misaddress(header: Header, body: bytes, number: int) -> tuple[Header, bytes]:
    """A well-formed frame with a wrong destination."""
    piece = header.piece
    if piece is None:
        if header.type in (FrameType.FINISH, FrameType.ACK) and number % 2:
            return replace(header, seq=header.seq + 1), body
        return replace(header, ticket_id=f"{number:032x}"), body
    changes: tuple[Callable[[], Piece], ...] = (
        lambda: replace(piece, first_block=piece.first_block + 1),
        lambda: replace(piece, layer_start=piece.layer_start + 1),
        lambda: replace(piece, seq=piece.seq + 1),
        lambda: replace(piece, head_start=piece.head_start + 1),
        lambda: replace(piece, block_count=piece.block_count + 1),
    )
    choice = number % (len(changes) + 1)
    if choice == len(changes):
        return replace(header, ticket_id=f"{number:032x}"), body
    return replace(header, piece=changes[choice]()), body


def flip_in_pool(pool: Pool, span: PoolSpan, number: int) -> None:
    """Flips a bit of the first valid token of some block and layer of the span."""
    block = span.block_ids[number % len(span.block_ids)]
    layer = span.layer_start + number % span.layer_count
    where = (block, layer, number % 2, span.head_start, 0, 0)
    if isinstance(pool, PoolMap):
        pool.blocks[where] ^= np.uint8(1 << number % 8)
    else:
        pool.words[where] ^= 1 << number % 8


def host_digest(local: LocalRank, span: PoolSpan) -> int:
    with local.pool.on_host(span, local.staging, write=False) as (host, inner, _):
        return digest_of(host, inner)


class FaultySender:
    def __init__(self, inner: KvSender, local: LocalRank, thread: LinkThread, plan: FaultPlan) -> None:
        self._inner = inner
        self._local = local
        self._thread = thread
        self._plan = plan

    def hello_fds(self) -> list[int]:
        if self._plan.next("hello", (OperationFaultKind.FAIL,)):
            raise broken("hello")
        return self._inner.hello_fds()

    async def establish(self, welcome: Welcome) -> None:
        await apply_fault(self._plan.next("connect", _SETUP), "connect", self._thread)
        await self._inner.establish(welcome)

    async def send_probe(self, stream: FrameStream) -> int:
        fault = self._plan.next("send_probe", (*_SETUP, OperationFaultKind.FLIP))
        await apply_fault(fault, "send_probe", self._thread)
        digest = await self._inner.send_probe(stream)
        return digest ^ 1 if fault is not None and fault.kind is OperationFaultKind.FLIP else digest

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: PoolSpan) -> None:
        await apply_fault(self._plan.next("push", _OPERATION), "push", self._thread)
        if isinstance(stream, FaultyStream):
            stream.memory = (self._local.pool, span)
        await self._inner.push(stream, ticket_id, piece, span)

    async def settle(self) -> None:
        await self._inner.settle()

    def close(self) -> None:
        self._inner.close()


class FaultyReceiver:
    def __init__(self, inner: KvReceiver, local: LocalRank, thread: LinkThread, plan: FaultPlan) -> None:
        self.places_ahead = inner.places_ahead
        self._inner = inner
        self._local = local
        self._thread = thread
        self._plan = plan

    async def prepare(self, fds: list[int]) -> WelcomeTerms:
        await apply_fault(self._plan.next("prepare", _SETUP), "prepare", self._thread)
        return await self._inner.prepare(fds)

    async def establish(self) -> None:
        await apply_fault(self._plan.next("join", _SETUP), "join", self._thread)
        await self._inner.establish()

    async def receive_probe(self) -> int:
        return await self._inner.receive_probe()

    async def fetch(self, piece: Piece, body: bytes) -> PieceArrival:
        await apply_fault(self._plan.next("fetch", _OPERATION), "fetch", self._thread)
        return FaultyArrival(await self._inner.fetch(piece, body), self._local, self._thread, self._plan)

    def close(self) -> None:
        self._inner.close()


class FaultyArrival:
    def __init__(self, inner: PieceArrival, local: LocalRank, thread: LinkThread, plan: FaultPlan) -> None:
        self._inner = inner
        self._local = local
        self._thread = thread
        self._plan = plan

    @property
    def digest_follows(self) -> bool:
        return self._inner.digest_follows

    async def place(self, span: PoolSpan) -> int:
        fault = self._plan.next("place", (*_OPERATION, OperationFaultKind.DROP, OperationFaultKind.FLIP))
        await apply_fault(fault, "place", self._thread)
        if fault is None or fault.kind is OperationFaultKind.DELAY:
            return await self._inner.place(span)
        if fault.kind is OperationFaultKind.FLIP:
            placed = await self._inner.place(span)
            before = host_digest(self._local, span)
            flip_in_pool(self._local.pool, span, fault.number)
            return placed ^ before ^ host_digest(self._local, span)
        await self._inner.discard()
        return host_digest(self._local, span)  # the digest of the previous content

    async def discard(self) -> None:
        await self._inner.discard()


async def apply_fault(fault: OperationFault | None, point: str, thread: LinkThread) -> None:
    """Fails, delays or hangs. Delays and hangs run in the link's thread, like a collective operation."""
    if fault is None:
        return
    match fault.kind:
        case OperationFaultKind.FAIL:
            raise broken(point)
        case OperationFaultKind.DELAY:
            await thread.run(time.sleep, fault.delay_s)
        case OperationFaultKind.HANG:
            await thread.run(time.sleep, HANG_S)
        case _:
            pass  # the operation applies it


class FatalPlan(FaultPlan):
    """Kills the process at its first operation at `point`, which `killed` notes."""

    def __init__(self, point: str, killed: Path) -> None:
        super().__init__(FaultSettings(every=1, limit=0))
        self._point = point
        self._killed = killed

    def next(
        self, point: str, can: Collection[OperationFaultKind] = tuple(OperationFaultKind)
    ) -> OperationFault | None:
        if point == self._point and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return None


def counted_channel(plan: FaultPlan) -> type[Channel[T]]:
    """A channel to rank or leader whose messages the plan counts."""

    class CountedChannel(Channel[T]):
        def send(self, message: msgspec.Struct) -> None:
            plan.next(type(message).__name__, ())
            super().send(message)

        async def __aiter__(self) -> AsyncIterator[T]:
            async for message in super().__aiter__():
                plan.next(type(message).__name__, ())
                yield message

    return CountedChannel


class FaultyTransports(Transports):
    def __init__(self, plan: FaultPlan) -> None:
        super().__init__()
        self._plan = plan

    async def sender(self, kind: str, local: LocalRank, peer: Peer, thread: LinkThread) -> KvSender:
        return FaultySender(await super().sender(kind, local, peer, thread), local, thread, self._plan)

    async def receiver(
        self, local: LocalRank, hello: Hello, link: PlannedLink, thread: LinkThread, *, digests: bool
    ) -> KvReceiver:
        inner = await super().receiver(local, hello, link, thread, digests=digests)
        return FaultyReceiver(inner, local, thread, self._plan)

    async def frames(self, raw: Wire) -> FrameStream:
        return FaultyStream.around(await super().frames(raw), self._plan)


def faults_of(socket_path: Path) -> Path:
    """The file in which the agent at `socket_path` logs each fault: a line with point and kind."""
    return socket_path.with_suffix(".faults")


def killed_of(socket_path: Path) -> Path:
    """There once the agent at `socket_path` was killed at its point."""
    return socket_path.with_suffix(".killed")


def stepping_wall_clock(real: Callable[[], float]) -> Callable[[], float]:
    """A wall clock that alternates between an hour ahead, correct, and an hour behind."""
    steps = itertools.cycle((3600.0, 0.0, -3600.0))
    return lambda: real() + next(steps)


def run() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvtransfer.testing.agent", add_help=False)
    parser.add_argument("--faults", type=FaultSettings.from_json, default=FaultSettings(every=1, limit=0))
    parser.add_argument("--killed-at", metavar="POINT")
    parser.add_argument(
        "--wall-clock-steps", action="store_true", help="make the wall clock jump by an hour at every call"
    )
    parser.add_argument("--warm-links", type=int, help="links kept open without tickets")
    parser.add_argument("--socket", type=Path, required=True)
    options, others = parser.parse_known_args()

    if options.wall_clock_steps:
        time.time = stepping_wall_clock(time.time)

    if options.warm_links is not None:
        agent.WARM_LINKS, agent.REST_AFTER_S = options.warm_links, 0.0

    def note(point: str, fault: OperationFault) -> None:
        with faults_of(options.socket).open("a") as file:
            file.write(f"{point} {fault.kind}\n")

    plan = FaultPlan(options.faults, note)
    if options.killed_at:
        plan = FatalPlan(options.killed_at, killed_of(options.socket))
        agent.Channel = counted_channel(plan)  # type: ignore[attr-defined]
    main(FaultyTransports(plan), [*others, "--socket", str(options.socket)])


if __name__ == "__main__":
    run()
