"""Where the time to the first token goes."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Kind, Row, lines, percentiles, stack
from deploy.grafana.promql import gauge, rate, worker_gauge

STAGE = "tandem_ttft_stage_seconds"
PARTS = (
    f"{rate(f'{STAGE}_sum', by='stage', model=True)} / on () group_left () "
    f"{rate('tandem_ttft_seconds_count', model=True)}"
)

TTFT = Dashboard(
    uid="tandem-ttft",
    title="Tandem / Where TTFT goes",
    text="The stages of the time to first token, in order: queue, reserve, dispatch, prefill, first_token.",
    rows=(
        Row(
            "Total",
            (
                percentiles("TTFT", "Received to first token, of finished requests.", "tandem_ttft_seconds"),
                stack(
                    "Mean parts",
                    "Over all finished requests; they add up to the mean TTFT. queue: in the router. reserve: the "
                    "decode worker leases blocks (handoffs only). dispatch: in the queue of the worker that "
                    "prefills. prefill: computing uncached tokens. first_token: from there to the router. "
                    "retry: failed attempts.",
                    "s",
                    (PARTS, "{{stage}}"),
                ),
                lines(
                    "TTFT, all requests",
                    "Number of requests by TTFT. Two bands mean two kinds of requests: "
                    "cached and not, or short and long.",
                    "s",
                    (rate("tandem_ttft_seconds_bucket", by="le", model=True), "{{le}}"),
                    kind=Kind.HEATMAP,
                ),
            ),
        ),
        Row(
            "Stages",
            (
                percentiles("Queue", "Received until sent to workers.", "tandem_queue_seconds"),
                percentiles(
                    "Reserve",
                    "Reserve sent until ticket received. Long: the decode worker's steps are long.",
                    STAGE,
                    'stage="reserve"',
                ),
                percentiles(
                    "Dispatch",
                    "Sent to the worker until its first engine step with the prompt. Long: more prompts wait there "
                    "than it computes.",
                    STAGE,
                    'stage="dispatch"',
                ),
                percentiles(
                    "Prefill",
                    "First engine step with this prompt until first token, on any worker.",
                    STAGE,
                    'stage="prefill"',
                    width=12,
                ),
                percentiles(
                    "First token",
                    "From the worker to the router. Long: the router or the network is slow.",
                    STAGE,
                    'stage="first_token"',
                    width=12,
                ),
            ),
        ),
        Row(
            "Why requests wait",
            (
                stack(
                    "Queued, by class",
                    "Requests in the routers' queues.",
                    "none",
                    (gauge("tandem_class_queued_requests", by="class"), "{{class}}"),
                ),
                lines(
                    "Waits by reason",
                    "Requests that waited at the head of the queue. prefill_full: add prefill workers or shorten "
                    "prompts. decode_refused: KV blocks are full.",
                    "reqps",
                    (rate("tandem_waits_total", by="reason", model=True), "{{reason}}"),
                ),
                lines(
                    "Prompt tokens on workers",
                    "Still to compute, by worker. One far above the others: its prompts are long, or it is slow.",
                    "none",
                    (worker_gauge("tandem_worker_waiting_tokens", by="worker"), "{{worker}}"),
                ),
                stack(
                    "Refused by admission",
                    "slo: the first token would miss the class's objective. queue_full, pushed_out: no room. "
                    "timeout, deadline: the request waited too long.",
                    "reqps",
                    (rate("tandem_admission_refusals_total", by="class, reason"), "{{class}} {{reason}}"),
                ),
                stack(
                    "Placements by reason",
                    "Local prefill or handoff, and why (docs/routing.md).",
                    "reqps",
                    (rate("tandem_placements_total", by="reason", model=True), "{{reason}}"),
                ),
                lines(
                    "Drain rate",
                    "Prompt tokens a pool prefills per second while requests wait; the basis of TTFT predictions.",
                    "none",
                    (gauge("tandem_drain_tokens_per_second", by="model", model=True), "{{model}}"),
                ),
            ),
        ),
    ),
)
