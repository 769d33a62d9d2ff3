"""An agent whose transport is broken in one way: `python faulty_agent.py FAULT --socket PATH`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from kvtransfer.agent import main
from kvtransfer.control import Peer
from kvtransfer.handshake import Hello, Own
from kvtransfer.piece import Piece
from kvtransfer.pool import Span
from kvtransfer.reshard import Link
from kvtransfer.stream import FrameStream
from kvtransfer.transports.factory import Transports
from kvtransfer.transports.mapped import MappedArrival, MappedReceiver, MappedSender
from kvtransfer.transports.protocol import KvReceiver, KvSender, LinkThread


class BadDigestSender(MappedSender):
    def digest(self, span: Span) -> int:
        return super().digest(span) ^ 1


class CorruptingSender(MappedSender):
    """Its memory changes between digest and copy."""

    def digest(self, span: Span) -> int:
        digest = super().digest(span)
        self._own.pool.blocks[span.block_ids[0], span.layer_start, 0, span.head_start, 0, 0] ^= 1
        return digest


class DuplicatingSender(MappedSender):
    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: Span) -> None:
        await super().push(stream, ticket_id, piece, span)
        await super().push(stream, ticket_id, replace(piece, seq=piece.seq + 1), span)


class WildSender(MappedSender):
    """Names blocks that its pool does not have."""

    async def push(self, stream: FrameStream, ticket_id: str, piece: Piece, span: Span) -> None:
        self._digests = False
        await super().push(stream, ticket_id, piece, replace(span, block_ids=(4_000_000,) * len(span.block_ids)))


class SlowArrival(MappedArrival):
    def _copy(self, span: Span) -> int:
        time.sleep(0.6)
        return MappedArrival._copy(self, span)


class SlowReceiver(MappedReceiver):
    async def fetch(self, piece: Piece, body: bytes) -> MappedArrival:
        arrival = await super().fetch(piece, body)
        # larger than anything that is done at once: the write runs in the link's thread
        return SlowArrival(arrival.own, arrival.source, arrival.read, 1 << 30, arrival.thread, arrival.digests)


class BadProbeSender(MappedSender):
    async def send_probe(self, stream: FrameStream) -> int:
        return await super().send_probe(stream) ^ 1


SENDERS: dict[str, type[MappedSender]] = {
    "bad-digest": BadDigestSender,
    "corrupting": CorruptingSender,
    "duplicating": DuplicatingSender,
    "wild": WildSender,
    "bad-probe": BadProbeSender,
}


class FaultyTransports(Transports):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    async def sender(self, kind: str, own: Own, peer: Peer, thread: LinkThread) -> KvSender:
        return SENDERS.get(self._fault, MappedSender)(own, thread)

    async def receiver(self, own: Own, hello: Hello, link: Link, thread: LinkThread, *, digests: bool) -> KvReceiver:
        kind = SlowReceiver if self._fault == "slow" else MappedReceiver
        return kind(own, thread, hello, link, digests=digests)


if __name__ == "__main__":
    main(FaultyTransports(sys.argv[1]), sys.argv[2:])
