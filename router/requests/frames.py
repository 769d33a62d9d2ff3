"""The frames a router asks workers with, for requests under way. Each goes to the end of its link's queue.

A message that is given to the constructor of another is copied; what holds a prompt is filled in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.workers.fleet import Worker


def generate(worker: Worker, work: worker_pb2.Work) -> None:
    """Prefill locally and decode."""
    frame = worker_pb2.RouterFrame()
    frame.generate.work.CopyFrom(work)
    worker.link.send(frame)


def reserve(worker: Worker, work: worker_pb2.Work, sender: Worker) -> None:
    """Room for the KV cache that `sender` will push."""
    frame = worker_pb2.RouterFrame()
    asked = frame.reserve
    asked.work.CopyFrom(work)
    asked.prefill_worker, asked.prefill_epoch = sender.key.worker_id, sender.key.epoch
    asked.use_prefix_cache = True
    worker.link.send(frame)


def prefill(worker: Worker, work: worker_pb2.Work, ticket: worker_pb2.HandoffTicket) -> None:
    frame = worker_pb2.RouterFrame()
    frame.prefill.work.CopyFrom(work)
    frame.prefill.ticket.CopyFrom(ticket)
    worker.link.send(frame)


def join(worker: Worker, wire_id: str, first_token: int) -> None:
    """Decode on, from `first_token`, as soon as the KV cache is there and verified."""
    worker.link.send(worker_pb2.RouterFrame(join=worker_pb2.Join(request_id=wire_id, first_token=first_token)))


def hold(worker: Worker, wire_id: str) -> None:
    """No further token, until it is moved or resumed."""
    worker.link.send(worker_pb2.RouterFrame(hold=worker_pb2.Hold(request_id=wire_id)))


def move(worker: Worker, wire_id: str, ticket: worker_pb2.HandoffTicket) -> None:
    """Push a held request's KV cache to the ticket's worker."""
    worker.link.send(worker_pb2.RouterFrame(move=worker_pb2.Move(request_id=wire_id, ticket=ticket)))


def resume(worker: Worker, wire_id: str) -> None:
    worker.link.send(worker_pb2.RouterFrame(resume=worker_pb2.Resume(request_id=wire_id)))
