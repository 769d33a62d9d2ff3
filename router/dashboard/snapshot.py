"""What the dashboard and `tandem top` show: one value, read-only, as JSON. Ids and numbers, never prompt text.

Times are seconds, sizes bytes; None is "not known". A reader that finds another `version` than it knows says so;
fields may be added without a new version.
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


class Router(msgspec.Struct, frozen=True):
    router_id: str
    state: str  # as the controller sees it: starting, ready, not_ready, restarting, failed
    restarts: int = 0
    http_address: str = ""


class WorkerRow(msgspec.Struct, frozen=True):
    worker_id: str
    role: str
    model: str
    epoch: str  # 64 bits, more than JSON's readers can be trusted with
    tp: int
    state: str  # ready, link_lost, leaving; or as the controller sees it: starting, unreachable, restarting, failed
    health: str | None  # healthy, suspect, ejected, probation; None: this router has no link to it
    reason: str = ""  # why it is not ready
    restarts: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    reserved_requests: int = 0
    waiting_tokens: int = 0
    blocks: Blocks = Blocks()
    prefill_tokens_per_s: float | None = None  # what the router reckons with, prefill workers
    tpot_s: float | None = None  # likewise, at its present batch; decode workers


class FlowRow(msgspec.Struct, frozen=True):
    """From a prefill to a decode worker. Of this router's requests, but for what the links themselves say."""

    prefill_worker: str
    decode_worker: str
    bytes_per_s: float = 0.0  # over the last seconds
    handoffs_per_s: float = 0.0
    in_flight: int = 0  # handoffs reserved and not yet joined
    handoffs: int = 0
    bytes: int = 0
    failures: int = 0
    state: str | None = None  # of the worst of its links: connecting, ready, refused, down
    transport: str | None = None
    latency_s: float | None = None
    link_bytes_per_s: float | None = None  # what handoffs got while they moved


class Queue(msgspec.Struct, frozen=True):
    """One class."""

    name: str
    queued: int
    is_batch: bool
    ttft_slo_s: float | None
    refusals: dict[str, int]  # by reason, since the router's start


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """Seconds."""

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
    """One value for each slice; None where nothing happened."""

    p50: list[float | None]
    p90: list[float | None]
    p99: list[float | None]


class History(msgspec.Struct, frozen=True):
    """Slices of `slice_s`, oldest first; the last is still open and began at `last_unix_s`."""

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
    """Over the last `window_s`."""

    window_s: float
    requests_per_s: float
    not_finished_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    handoffs_per_s: float
    handoff_bytes_per_s: float


class Cache(msgspec.Struct, frozen=True):
    hit_share: float | None  # prompt tokens found in a cache, over the last `window_s`
    wrong_credit_share: float | None  # of the tokens the index promised, those that had to be computed after all
    window_s: float
    hit_share_history: list[float | None]  # in the slices of History
    index_blocks: int
    index_workers: int
    lost_blocks: int
    redis: str  # none, up, down


class Request(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    state: str
    error: str
    received_unix_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float  # so far, while it runs
    attempts: int
    prefill_worker: str  # of the last attempt; empty: prefilled on the decode worker
    decode_worker: str  # empty: no worker yet
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
    """The ratio of the pools. `decisions`: of the autoscaler, newest first."""

    prefill_ready: int
    prefill_total: int
    decode_ready: int
    decode_total: int
    autoscaler: str  # off: the ratio is the operator's
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
    controller: bool  # whether it answered; without it, routers and workers are what this router knows
    routers: list[Router]
    workers: list[WorkerRow]
    flows: list[FlowRow]
    queues: list[Queue]
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
    requests: list[Request]  # on their way, then the last that ended; newest first


class SpanRow(msgspec.Struct, frozen=True):
    """Seconds since the request was received."""

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
    request: Request
    attempts: list[AttemptRow]
