"""Where the time to the first token goes."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Kind, Row, lines, percentiles, stack
from deploy.grafana.promql import gauge, mean, rate, worker_gauge

TTFT = Dashboard(
    uid="tandem-ttft",
    title="Tandem / Where TTFT goes",
    text="The parts of the time to the first token, in the order in which they pass: queue, reserve, prefill.",
    rows=(
        Row(
            "The whole",
            (
                percentiles("TTFT", "Received to first token, of finished requests.", "tandem_ttft_seconds"),
                stack(
                    "Mean parts",
                    "queue: received to sent to workers. reserve: the decode worker leases blocks. prefill: first "
                    "engine step to first token; what is cached is not computed. Only handoffs have the last two.",
                    "s",
                    (mean("tandem_queue_seconds"), "queue"),
                    (mean("tandem_handoff_stage_seconds", 'stage="reserve"'), "reserve"),
                    (mean("tandem_handoff_stage_seconds", 'stage="prefill"'), "prefill"),
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
                    "tandem_handoff_stage_seconds",
                    'stage="reserve"',
                ),
                percentiles(
                    "Prefill",
                    "First engine step with this prompt to first token, of handoffs.",
                    "tandem_handoff_stage_seconds",
                    'stage="prefill"',
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
