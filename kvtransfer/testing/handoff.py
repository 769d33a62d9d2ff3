"""Handoffs between workers without an engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from kvtransfer.control import BeginStep, LayerDone, OpenReceive, OpenSend, Range
from kvtransfer.session.ticket import Ticket
from kvtransfer.testing.worker import FakeKv, FakeWorker


@dataclass(slots=True)
class Handoff:
    """One prompt in transit between two fake workers."""

    prefill: FakeWorker
    decode: FakeWorker
    kv: FakeKv
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    ticket: Ticket

    @classmethod
    def make(
        cls,
        prefill: FakeWorker,
        decode: FakeWorker,
        tokens: int,
        *,
        first_block: int = 0,
        seed: int = 0,
        ttl_s: float = 30.0,  # of a busy machine
    ) -> Handoff:
        kv = FakeKv(decode.model, tokens, seed)
        generator = np.random.default_rng(seed + 1)
        source = tuple(generator.permutation(prefill.num_blocks)[: kv.blocks].tolist())
        target = tuple(generator.permutation(decode.num_blocks)[: kv.blocks].tolist())
        ticket = Ticket(
            ticket_id=secrets.token_hex(16),
            request_id=f"request-{seed}",
            decode_worker=decode.worker_id,
            decode_epoch=decode.epoch,
            prefill_worker=prefill.worker_id,
            prefill_epoch=prefill.epoch,
            first_block=first_block,
            block_count=kv.blocks - first_block,
            prompt_tokens=tokens,
            ttl_s=ttl_s,
        )
        return cls(prefill, decode, kv, source, target, ticket)

    @property
    def ticket_id(self) -> str:
        return self.ticket.ticket_id

    def open_receive(self) -> None:
        ticket = self.ticket
        message = OpenReceive(
            ticket.ticket_id,
            ticket.prefill_worker,
            ticket.prefill_epoch,
            ticket.first_block,
            self.target_ids[ticket.first_block :],
            ticket.prompt_tokens,
        )
        for rank in self.decode.ranks:
            rank.send_as_leader(message)

    def open_send(self, *, key: bytes | None = None) -> None:
        ticket = self.ticket
        message = OpenSend(
            ticket_id=ticket.ticket_id,
            signed_ticket=ticket.sign(key or self.decode.key),
            export_id=ticket.request_id,
            decode_worker=ticket.decode_worker,
            decode_epoch=ticket.decode_epoch,
            first_block=ticket.first_block,
            prompt_tokens=ticket.prompt_tokens,
        )
        for rank in self.prefill.ranks:
            rank.send_as_leader(message)

    def range(self, first: int, end: int, *, in_cache: bool) -> Range:
        layout = self.decode.ranks[0].layout
        return Range(
            export_id=self.ticket.request_id,
            first_block=first,
            block_ids=self.source_ids[first:end],
            last_block_tokens=layout.last_tokens(self.kv.tokens) if end == self.kv.blocks else layout.block_tokens,
            in_cache=in_cache,
            is_last=end == self.kv.blocks,
        )

    def export_cached(self, first: int, end: int) -> None:
        """Exports blocks that the prefill worker had cached."""
        for rank in self.prefill.ranks:
            rank.write(self.kv, self.source_ids[first:end], first)
            rank.send_as_rank(BeginStep((self.range(first, end, in_cache=True),)))

    def compute(self, first: int, end: int, *, layers: int | None = None) -> None:
        """One engine step over these blocks, layer by layer; stops after `layers` layers."""
        message = BeginStep((self.range(first, end, in_cache=False),))
        for rank in self.prefill.ranks:
            rank.send_as_rank(message)
            for layer in range(self.prefill.model.layers if layers is None else layers):
                rank.write(self.kv, self.source_ids[first:end], first, slice(layer, layer + 1))
                rank.send_as_rank(LayerDone(layer))

    def arrived(self) -> bool:
        first = self.ticket.first_block
        return all(rank.holds(self.kv, self.target_ids[first:], first) for rank in self.decode.ranks)
