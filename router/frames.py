"""The frames a router asks workers with, for requests under way. Each goes to the end of its link's queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from router.fleet import Worker


def generate(worker: Worker, work: worker_pb2.Work) -> None:
    """Prefill locally and decode."""
    worker.link.send(worker_pb2.RouterFrame(generate=worker_pb2.Generate(work=work)))


def reserve(worker: Worker, work: worker_pb2.Work, sender: Worker) -> None:
    """Room for the KV cache that `sender` will push."""
    asked = worker_pb2.Reserve(
        work=work, prefill_worker=sender.key.worker_id, prefill_epoch=sender.key.epoch, use_prefix_cache=True
    )
    worker.link.send(worker_pb2.RouterFrame(reserve=asked))


def prefill(worker: Worker, work: worker_pb2.Work, ticket: worker_pb2.HandoffTicket) -> None:
    worker.link.send(worker_pb2.RouterFrame(prefill=worker_pb2.Prefill(work=work, ticket=ticket)))


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
