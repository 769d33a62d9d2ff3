"""One frame of `tandem top`: the controller's status joined with the snapshots of all routers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from router.dashboard.cluster_status import with_all_workers, with_links
from router.dashboard.snapshot import VERSION, EventRow, FlowRow, QueueRow, RequestRow, Snapshot, WorkerRow
from tandem.errors import UnavailableError
from tandem.v1 import cluster_pb2

_HEALTH = ("healthy", "probation", "suspect", "ejected")  # from best to worst
_END_STATES = frozenset({"finished", "rejected", "cancelled", "failed"})


class _Head(msgspec.Struct):
    version: int


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """`view`: the router's snapshot; None if it did not answer."""

    router_id: str
    state: str
    restarts: int
    view: Snapshot | None


@dataclass(frozen=True, slots=True)
class TopFrame:
    cluster: str
    version: str
    redis: str
    routers: list[RouterAnswer]
    workers: list[WorkerRow]
    flows: list[FlowRow]
    queues: list[QueueRow]
    requests: list[RequestRow]
    events: list[EventRow]


def parse_snapshot(raw: bytes) -> Snapshot:
    """Raises UnavailableError if a router of another version sent it."""
    try:
        found = msgspec.json.decode(raw, type=_Head).version
        if found == VERSION:
            return msgspec.json.decode(raw, type=Snapshot)
    except msgspec.DecodeError as error:
        raise UnavailableError(
            f"cannot read a router's snapshot ({error}): does the router have another version?"
        ) from None
    raise UnavailableError(f"expected version {VERSION} of a router's snapshot, got {found}: update this command")


def build(status: cluster_pb2.ClusterStatus, views: Sequence[Snapshot]) -> TopFrame:
    """Adds up the routers' figures, except latencies, which stay per router. A router without a snapshot is shown as
    the controller reports it."""
    by_id = {view.router_id: view for view in views}
    routers = [
        RouterAnswer(each.router_id, each.state, each.restarts, by_id.get(each.router_id)) for each in status.routers
    ]
    workers = with_all_workers(worst_of_each(views), status)
    requests = [request for view in views for request in view.requests]
    requests.sort(key=lambda request: (request.state in _END_STATES, -request.received_unix_s))
    return TopFrame(
        cluster=status.cluster,
        version=status.version,
        redis=status.redis,
        routers=routers,
        workers=sorted(workers, key=lambda worker: (worker.model, worker.role != "prefill")),
        flows=with_links(_flows(flow for view in views for flow in view.flows), status),
        queues=_queues(queue for view in views for queue in view.queues),
        requests=requests,
        events=sorted((event for view in views for event in view.events), key=lambda event: -event.last_unix_s),
    )


def worst_of_each(views: Iterable[Snapshot]) -> list[WorkerRow]:
    """Each epoch of each worker once, with the worst health that any router reports."""
    found: dict[tuple[str, str], WorkerRow] = {}
    for worker in (worker for view in views for worker in view.workers):
        key = worker.worker_id, worker.epoch
        known = found.get(key)
        if known is None or _health_rank(worker) > _health_rank(known):
            found[key] = worker
    return list(found.values())


def _health_rank(worker: WorkerRow) -> int:
    return _HEALTH.index(worker.health) if worker.health in _HEALTH else -1


def _flows(flows: Iterable[FlowRow]) -> list[FlowRow]:
    found: dict[tuple[str, str], FlowRow] = {}
    for flow in flows:
        pair = flow.prefill_worker, flow.decode_worker
        known = found.get(pair)
        found[pair] = (
            flow
            if known is None
            else msgspec.structs.replace(
                known,
                bytes_per_s=known.bytes_per_s + flow.bytes_per_s,
                handoffs_per_s=known.handoffs_per_s + flow.handoffs_per_s,
                in_flight=known.in_flight + flow.in_flight,
                handoffs=known.handoffs + flow.handoffs,
                bytes=known.bytes + flow.bytes,
                failures=known.failures + flow.failures,
            )
        )
    return list(found.values())


def _queues(queues: Iterable[QueueRow]) -> list[QueueRow]:
    found: dict[str, QueueRow] = {}
    for queue in queues:
        known = found.get(queue.name)
        found[queue.name] = (
            queue
            if known is None
            else msgspec.structs.replace(
                known,
                queued=known.queued + queue.queued,
                refusals=dict(Counter(known.refusals) + Counter(queue.refusals)),
            )
        )
    return list(found.values())
