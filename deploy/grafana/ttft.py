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
    text="The parts of the time to the first token, in the order in which they pass: queue, reserve, dispatch, "
    "prefill, first_token.",
    rows=(
        Row(
            "The whole",
            (
                percentiles("TTFT", "Received to first token, of finished requests.", "tandem_ttft_seconds"),
                stack(
                    "Mean parts",
                    "Of all finished requests, so together they are the mean TTFT. queue: in the router. reserve: the "
                    "decode worker leases blocks (handoffs only). dispatch: in line at whoever prefills. prefill: "
                    "computing what is not cached. first_token: from there to the router. retry: failed attempts.",
                    "s",
                    (PARTS, "{{stage}}"),
                ),
                lines(
                    "TTFT, all requests",
                    "How many requests had their first token in which time. Two bands are two kinds of requests: "
                    "cached and not, or short and long.",
                    "s",
                    (rate("tandem_ttft_seconds_bucket", by="le", model=True), "{{le}}"),
                    kind=Kind.HEATMAP,
                ),
            ),
        ),
        Row(
            "The parts",
            (
                percentiles("Queue", "Received to sent to workers.", "tandem_queue_seconds"),
                percentiles(
                    "Reserve",
                    "Reserve sent to ticket received. Long: the decode worker's steps are.",
                    STAGE,
                    'stage="reserve"',
                ),
                percentiles(
                    "Dispatch",
                    "Sent to whoever prefills until its first engine step with the prompt. Long: more prompts are "
                    "there than it computes.",
                    STAGE,
                    'stage="dispatch"',
                ),
                percentiles(
                    "Prefill",
                    "First engine step with this prompt to first token, wherever it was prefilled.",
                    STAGE,
                    'stage="prefill"',
                    width=12,
                ),
                percentiles(
                    "First token",
                    "From the worker to the router. Long: the router is late, or the network.",
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
                    "In line, by class",
                    "Requests in the routers' queues now.",
                    "none",
                    (gauge("tandem_class_queued_requests", by="class"), "{{class}}"),
                ),
                lines(
                    "Waits by reason",
                    "Requests that had to wait at the head of the line. prefill_full: more prefill workers, or shorter "
                    "prompts. decode_refused: KV blocks are full.",
                    "reqps",
                    (rate("tandem_waits_total", by="reason", model=True), "{{reason}}"),
                ),
                lines(
                    "Prompt tokens on workers",
                    "Still to be computed, by worker. One far above the others: its prompts are long, or it is slow.",
                    "none",
                    (worker_gauge("tandem_worker_waiting_tokens", by="worker"), "{{worker}}"),
                ),
                stack(
                    "Refused by admission",
                    "slo: the first token would come later than the class promises. queue_full, pushed_out: no room. "
                    "timeout, deadline: it waited as long as it may.",
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
                    "Prompt tokens a pool prefills per second while requests wait: what predictions of TTFT rest on.",
                    "none",
                    (gauge("tandem_drain_tokens_per_second", by="model", model=True), "{{model}}"),
                ),
            ),
        ),
    ),
)
