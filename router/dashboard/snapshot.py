"""The JSON snapshot that the dashboard and `tandem top` show. Ids and numbers, never prompt text.

Times are seconds, sizes bytes; None means unknown. Readers must report an unknown `version`. New fields do not change
the version.
"""

from __future__ import annotations

import msgspec

VERSION = 1


class Blocks(msgspec.Struct, frozen=True):
    free: int = 0
    cached: int = 0
    leased: int = 0
    in_use: int = 0
    total: int = 0


class RouterRow(msgspec.Struct, frozen=True):
    router_id: str
    state: str  # by the controller: starting, ready, not_ready, restarting, failed
    restarts: int = 0
    http_address: str = ""


class WorkerRow(msgspec.Struct, frozen=True):
    worker_id: str
    role: str
    model: str
    epoch: str  # a string, because many JSON readers lose precision of 64-bit integers
    tp: int
    state: str  # ready, link_lost, leaving; or by the controller: starting, unreachable, restarting, failed
    health: str | None  # healthy, suspect, ejected, probation; None: this router has no link to it
    reason: str = ""  # why it is not ready
    restarts: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    reserved_requests: int = 0
    waiting_tokens: int = 0
    blocks: Blocks = Blocks()
    prefill_tokens_per_s: float | None = None  # the router's estimate; prefill workers
    tpot_s: float | None = None  # the router's estimate at the present batch size; decode workers
    mfu: float | None = None  # share of its devices' peak FLOP/s that the steps of the last seconds reached
    mbu: float | None = None  # likewise of peak memory bandwidth
    ridge: float | None = None  # FLOPs per byte at which these peaks meet


class FlowRow(msgspec.Struct, frozen=True):
    """KV traffic from a prefill to a decode worker, of this router's requests. The last four fields are the links'."""

    prefill_worker: str
    decode_worker: str
    bytes_per_s: float = 0.0  # over the last seconds
    handoffs_per_s: float = 0.0
    in_flight: int = 0  # handoffs not yet joined
    handoffs: int = 0
    bytes: int = 0
    failures: int = 0
    state: str | None = None  # of the worst of its links: connecting, ready, refused, down
    transport: str | None = None
    latency_s: float | None = None
    link_bytes_per_s: float | None = None  # throughput while pieces are in flight


class QueueRow(msgspec.Struct, frozen=True):
    """The queue of one class."""

    name: str
    queued: int
    is_batch: bool
    ttft_slo_s: float | None
    refusals: dict[str, int]  # by reason, since the router's start


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds of `count` observations."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class LatencySummary(msgspec.Struct, frozen=True):
    window_s: float
    ttft: LatencyPercentiles
    tpot: LatencyPercentiles
    itl: LatencyPercentiles
    e2e: LatencyPercentiles


class Series(msgspec.Struct, frozen=True):
    """One value per slice; None without observations."""

    p50: list[float | None]
    p90: list[float | None]
    p99: list[float | None]


class History(msgspec.Struct, frozen=True):
    """Slices of `slice_s` seconds, oldest first. The last began at `last_unix_s` and is still open."""

    slice_s: float
    last_unix_s: float
    ttft: Series
    tpot: Series
    itl: Series
    e2e: Series
    requests: list[int]  # finished
    not_finished: list[int]
    output_tokens: list[int]
    prompt_tokens: list[int]
    handoff_bytes: list[int]


class Rates(msgspec.Struct, frozen=True):
    """Means over the last `window_s`."""

    window_s: float
    requests_per_s: float
    not_finished_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    handoffs_per_s: float
    handoff_bytes_per_s: float


class Cache(msgspec.Struct, frozen=True):
    hit_share: float | None  # share of prompt tokens found in a cache, over the last `window_s`
    wrong_credit_share: float | None  # share of the tokens credited by the index that were not cached
    window_s: float
    hit_share_history: list[float | None]  # in the slices of History
    index_blocks: int
    index_workers: int
    lost_blocks: int
    redis: str  # none, up, down


class RequestRow(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    state: str
    error: str
    received_unix_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float  # until now if it is in flight
    attempts: int
    prefill_worker: str  # of the last attempt; empty: prefilled on the decode worker
    decode_worker: str  # empty: not placed yet
    handoff_bytes: int


class PlacementRow(msgspec.Struct, frozen=True):
    at_unix_s: float
    request_id: str
    reason: str
    prefill_worker: str | None
    decode_worker: str
    prompt_tokens: int
    cached_tokens: int


class EventRow(msgspec.Struct, frozen=True):
    kind: str
    severity: str
    subject: str
    text: str
    first_unix_s: float
    last_unix_s: float
    times: int


class Scaling(msgspec.Struct, frozen=True):
    """The pools. `decisions`: the autoscaler's, newest first."""

    prefill_ready: int
    prefill_total: int
    decode_ready: int
    decode_total: int
    autoscaler: str  # mode and outlook; off: the operator sets the ratio
    decisions: list[EventRow]


class Snapshot(msgspec.Struct, frozen=True):
    version: int
    tandem: str
    cluster: str
    router_id: str
    taken_unix_s: float
    up_s: float
    ready: bool
    models: list[str]
    controller: bool  # whether it answered; if not, the lists hold what this router knows
    routers: list[RouterRow]
    workers: list[WorkerRow]
    flows: list[FlowRow]
    queues: list[QueueRow]
    queued_requests: int
    running_requests: int
    rates: Rates
    latency: list[LatencySummary]
    history: History
    cache: Cache
    scaling: Scaling
    placements: dict[str, int]  # by reason, since the router's start
    decisions: list[PlacementRow]
    events: list[EventRow]
    requests: list[RequestRow]  # in flight, then recently ended; newest first


class SpanRow(msgspec.Struct, frozen=True):
    """Start and end in seconds since the request was received."""

    stage: str
    start_s: float
    end_s: float


class AttemptRow(msgspec.Struct, frozen=True):
    prefill_worker: str
    decode_worker: str
    spans: list[SpanRow]
    bytes: int
    blocks: int
    pieces: int
    overlap_share: float | None
    exposed_s: float | None
    error: str
    cause: str
    message: str


class RequestTimeline(msgspec.Struct, frozen=True):
    version: int
    request: RequestRow
    attempts: list[AttemptRow]
