"""Handles the router's frames on simulated workers, between two steps, and reports events back.

It stands for worker.service and for the transfer agents of a handoff.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from planner.shared_host import BusyCores
from planner.simulator.events import EventLoop
from planner.simulator.links import busiest_shares, push
from planner.simulator.requests import LAST_TOKEN, SimRequest, SimToken
from planner.simulator.sequence import SimSequence, TokenCount, TraceBlockHashes
from planner.simulator.setup import Setup
from planner.simulator.worker import SimTicket, SimWorker
from router.requests import actions as act
from router.requests import events as ev
from router.requests.state_machine import RequestRun
from tandem.errors import InternalError, TandemError
from tandem.kvcache.blockhash import HashKey
from tandem.kvcache.layout import blocks_for
from tandem.request import FinishReason, SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.speculation.proposers import Speculation

_KEY = HashKey("simulated")


class FrameHandler:
    """The workers' side of the protocol."""

    def __init__(
        self,
        setup: Setup,
        loop: EventLoop,
        hashes: TraceBlockHashes,
        cores: BusyCores | None,
        deliver: Callable[[SimWorker, str, ev.Event], None],
        last_token_s: Callable[[int], float],
    ) -> None:
        """`deliver` sends an event to the router. `last_token_s(index)`: when the request's last token reached the
        router."""
        self._setup, self._loop, self._hashes, self._cores = setup, loop, hashes, cores
        self._deliver, self._last_token_s = deliver, last_token_s
        self._arrivals = 0

    # --- frames --------------------------------------------------------------------------------------------------

    def take(self, run: RequestRun, frame: act.Frame, worker: SimWorker) -> None:
        """Handles a frame. After a request has left the worker, only its Leave has an effect."""
        wire_id = frame.wire_id
        if isinstance(frame, act.Leave):
            worker.tickets.pop(wire_id, None)
            worker.scheduler.cancel(wire_id)
        elif wire_id in worker.attached:
            try:
                self._begin(run, frame, worker)
            except TandemError as error:
                self._deliver(worker, wire_id, ev.AttemptEnded(worker.key, error=error))

    def _begin(self, run: RequestRun, frame: act.Frame, worker: SimWorker) -> None:
        """Raises TandemError if the worker refuses."""
        match frame:
            case act.Generate():
                worker.scheduler.add(self._sequence(worker, run, frame.wire_id))
            case act.Reserve():
                sequence = self._sequence(worker, run, frame.wire_id)
                ticket = SimTicket(worker, sequence, worker.scheduler.reserve(sequence))
                worker.tickets[frame.wire_id] = ticket
                cached_tokens = ticket.cached_blocks * self._setup.block_tokens
                self._deliver(worker, frame.wire_id, ev.Reserved(worker.key, ticket, cached_tokens))
            case act.Prefill(ticket=SimTicket() as ticket):
                worker.tickets[frame.wire_id] = ticket
                ticket.has_landed = self._is_whole(ticket)
                worker.scheduler.add(self._sequence(worker, run, frame.wire_id, ticket.cached_blocks))
            case act.Join():
                ticket = worker.tickets[frame.wire_id]
                ticket.may_join = True
                self._join(ticket)
            case _:
                raise InternalError(f"expected a frame of a handoff or a local prefill, got {frame}")

    def _sequence(
        self, worker: SimWorker, run: RequestRun, wire_id: str, export_from_block: int | None = None
    ) -> SimSequence:
        self._arrivals += 1
        request = request_of(run)
        tokens, left = TokenCount(run.prefill_tokens), request.output_tokens - run.answer_tokens
        return SimSequence(
            request_id=wire_id,
            tokens=tokens,
            prompt_tokens=run.prefill_tokens,
            sampling=SamplingParams(max_tokens=left),
            hash_key=_KEY,
            block_tokens=self._setup.block_tokens,
            arrival=self._arrivals,
            arrived_s=self._loop.now_s(),
            use_prefix_cache=self._setup.caches,
            export_from_block=export_from_block,
            speculation=None if worker.scheduler.speculator is None else Speculation(),
            index=request.index,
            trace_hashes=self._hashes,
            counted=tokens,
            last_token_s=self._last_token_s(request.index) if run.answer_tokens else 0.0,
            _hashes=list(request.block_hashes),
        )

    # --- the engine's events -------------------------------------------------------------------------------------

    def first_token(self, worker: SimWorker, sequence: SimSequence) -> None:
        wire_id = sequence.request_id
        is_last = sequence.generated >= sequence.sampling.max_tokens
        token = SimToken(LAST_TOKEN if is_last else 0, sequence.cached_tokens or 0)
        self._deliver(worker, wire_id, ev.TokenSampled(worker.key, token))
        if sequence.is_exporting and (ticket := worker.tickets.get(wire_id)) is not None:
            ticket.first_token_s = self._loop.now_s()
            if self._is_whole(ticket):
                self._sent(worker, wire_id)

    def finished(self, worker: SimWorker, sequence: SimSequence) -> None:
        wire_id = sequence.request_id
        worker.tickets.pop(wire_id, None)
        if sequence.generated > 1:
            self._deliver(worker, wire_id, ev.TokensSampled(worker.key, [0] * (sequence.generated - 1)))
        self._deliver(worker, wire_id, ev.AttemptEnded(worker.key, FinishReason.STOP))

    def failed(self, worker: SimWorker, wire_id: str, error: TandemError) -> None:
        self._deliver(worker, wire_id, ev.AttemptEnded(worker.key, error=error))

    def export(self, worker: SimWorker, part: ExportRange, start_s: float, end_s: float) -> None:
        """Pushes a computed range to the worker of its ticket."""
        ticket, setup = worker.tickets.get(part.request_id), self._setup
        if ticket is None:
            return
        decode = ticket.decode
        tokens = (len(part.block_ids) - 1) * setup.block_tokens + part.last_block_tokens
        num_bytes = tokens * setup.kv_token_bytes
        sent, received = busiest_shares(worker.tp, decode.tp, setup.kv_heads)
        done_s = push(
            worker.egress,
            decode.ingress,
            start_s=start_s,
            end_s=end_s,
            layers=setup.layers,
            send_s=worker.cost.transfer_s(int(sent * num_bytes)),
            receive_s=decode.cost.transfer_s(int(received * num_bytes)),
            num_bytes=num_bytes * self._copies(decode),
        )
        if part.is_last:
            self._loop.call_at(done_s, self._received, worker, part.request_id, ticket)

    def _received(self, worker: SimWorker, wire_id: str, ticket: SimTicket) -> None:
        """Agents check what came before it counts as landed."""
        landed = partial(self._landed, worker, wire_id, ticket)
        if self._cores is None:
            landed()
        else:
            host = self._cores.host
            self._cores.spend(host.handoff_s + host.kv_byte_s * self._moved(ticket)[1], landed)

    def _landed(self, worker: SimWorker, wire_id: str, ticket: SimTicket) -> None:
        if not worker.lost:
            self._sent(worker, wire_id)
        ticket.has_landed = True
        if not ticket.decode.lost:
            ticket.decode.notify(self._join, ticket)

    def _sent(self, worker: SimWorker, wire_id: str) -> None:
        """Ends the prefill worker's side of the handoff: releases its blocks and reports."""
        worker.notify(self._release_export, worker, wire_id)
        report = ev.HandoffReported(worker.key, wire_id, 0, 0, self._setup.network_s, None, None)
        self._deliver(worker, wire_id, report)

    @staticmethod
    def _release_export(worker: SimWorker, wire_id: str) -> None:
        if worker.tickets.pop(wire_id, None) is not None:
            worker.scheduler.release_export(wire_id)

    def _join(self, ticket: SimTicket) -> None:
        worker, wire_id = ticket.decode, ticket.sequence.request_id
        if not (ticket.has_landed and ticket.may_join) or worker.tickets.get(wire_id) is not ticket:
            return
        del worker.tickets[wire_id]
        worker.scheduler.join(wire_id, 0)
        ticket.sequence.last_token_s = ticket.first_token_s
        blocks, num_bytes = self._moved(ticket)
        report = ev.HandoffReported(worker.key, wire_id, num_bytes, blocks, self._setup.network_s, 0.0, None)
        self._deliver(worker, wire_id, report)

    def _moved(self, ticket: SimTicket) -> tuple[int, int]:
        """Blocks and bytes."""
        blocks = blocks_for(ticket.sequence.prompt_tokens, self._setup.block_tokens) - ticket.cached_blocks
        tokens = blocks * self._setup.block_tokens
        return blocks, int(tokens * self._setup.kv_token_bytes * self._copies(ticket.decode))

    def _copies(self, decode: SimWorker) -> float:
        """Of the KV that it receives: ranks beyond the KV heads hold copies of them."""
        return max(1.0, decode.tp / self._setup.kv_heads)

    def _is_whole(self, ticket: SimTicket) -> bool:
        """The decode worker has every block cached and needs only the first token."""
        return ticket.cached_blocks * self._setup.block_tokens >= ticket.sequence.prompt_tokens


def request_of(run: RequestRun) -> SimRequest:
    assert isinstance(run.request, SimRequest)
    return run.request
