"""The handoff of KV blocks from prefill to decode workers."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Row, lines, number, percentiles, stack
from deploy.grafana.promql import increase, mean, percentile, rate, ratio, worker_gauge, worker_rate

STAGE = "tandem_handoff_stage_seconds"
JOINED = rate("tandem_handoff_seconds_count", model=True)
MOVED = rate("tandem_handoff_bytes_total", model=True)
HIDDEN = rate("tandem_handoff_hidden_bytes_total", model=True)
LINK = "worker, peer, transport"
LINK_LEGEND = "{{worker}} → {{peer}} {{transport}}"

HANDOFF = Dashboard(
    uid="tandem-handoff",
    title="Tandem / Handoff",
    text="Stages, bytes, overlap, links and failures of handoffs (docs/observability.md).",
    rows=(
        Row(
            "Now",
            (
                number("Handoffs", "Handoffs that joined a decode batch.", "reqps", JOINED),
                number(
                    "Share of requests",
                    "Finished requests with a handoff; the others were prefilled on their decode worker.",
                    "percentunit",
                    ratio(JOINED, rate("tandem_ttft_seconds_count", model=True)),
                    maximum=1.0,
                ),
                number(
                    "Hidden bytes",
                    "Share of the bytes that had arrived when the last layer was computed. Low: links are slower "
                    "than prefill, or prompts are short.",
                    "percentunit",
                    ratio(HIDDEN, MOVED),
                    maximum=1.0,
                    colour="orange",
                    colours_from=((0.5, "green"),),
                ),
                number(
                    "Failed attempts",
                    "Each is retried elsewhere; clients see no error until the retries are used up.",
                    "reqps",
                    f"{rate('tandem_handoff_failures_total', model=True)} or vector(0)",
                    colours_from=((0.001, "orange"), (0.1, "red")),
                ),
            ),
        ),
        Row(
            "Cost",
            (
                percentiles(
                    "First token to decode batch",
                    "What a client may notice between its first two tokens.",
                    "tandem_handoff_seconds",
                ),
                lines(
                    "Stages, p99",
                    "connect: links were slow to accept the ticket. join: the decode worker's steps are long. pieces "
                    "should lie inside prefill.",
                    "s",
                    (percentile(0.99, STAGE, by="stage"), "{{stage}}"),
                ),
                stack(
                    "Mean stages",
                    "Without pieces, which overlap prefill. reserve, dispatch, connect and prefill come before the "
                    "first token, verify and join after it.",
                    "s",
                    (mean(STAGE, 'stage!="pieces"', by="stage"), "{{stage}}"),
                ),
            ),
        ),
        Row(
            "Transfer",
            (
                lines(
                    "KV bytes",
                    "All bytes, and those hidden behind prefill.",
                    "Bps",
                    (MOVED, "moved"),
                    (HIDDEN, "hidden"),
                ),
                lines(
                    "Overlap",
                    "Hidden share of each handoff's bytes.",
                    "percentunit",
                    (percentile(0.5, "tandem_handoff_overlap_share"), "median"),
                    (percentile(0.1, "tandem_handoff_overlap_share"), "worst tenth"),
                    maximum=1.0,
                ),
                lines(
                    "Size of a handoff",
                    "Mean bytes of a handoff and of a piece. Small pieces cost more per byte.",
                    "bytes",
                    (ratio(MOVED, JOINED), "handoff"),
                    (ratio(MOVED, rate("tandem_handoff_pieces_total", model=True)), "piece"),
                ),
            ),
        ),
        Row(
            "Links",
            (
                lines(
                    "Sent",
                    "KV bytes per second of each link.",
                    "Bps",
                    (worker_rate("tandem_worker_link_bytes_total", by=LINK), LINK_LEGEND),
                ),
                lines(
                    "Speed",
                    "Recent speed of handoffs while sending. One link far below the others: check its hosts.",
                    "Bps",
                    (worker_gauge("tandem_worker_link_bytes_per_second", by=LINK), LINK_LEGEND),
                ),
                lines(
                    "Latency",
                    "Shortest probe when the link was made.",
                    "s",
                    (worker_gauge("tandem_worker_link_latency_seconds", by=LINK), LINK_LEGEND),
                ),
            ),
        ),
        Row(
            "Failures",
            (
                stack(
                    "Failed attempts by cause",
                    "docs/observability.md explains the causes. digest_mismatch should never occur.",
                    "none",
                    (increase("tandem_handoff_failures_total", by="cause", model=True), "{{cause}}"),
                    width=24,
                ),
            ),
        ),
    ),
)
