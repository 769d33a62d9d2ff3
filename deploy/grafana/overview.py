"""Is the cluster healthy, and do users get their objectives?"""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Row, lines, number, percentiles, stack
from deploy.grafana.promql import gauge, increase, of, percentile, rate, ratio, worker_gauge

FAILED = ratio(
    rate("tandem_requests_total", 'state="failed"', model=True),
    rate("tandem_requests_total", 'state!="cancelled"', model=True),
)
GOODPUT = rate("tandem_slo_requests_total", 'outcome="met"', by="class", model=True)
ATTAINED = ratio(GOODPUT, rate("tandem_slo_requests_total", by="class", model=True))

OVERVIEW = Dashboard(
    uid="tandem-overview",
    title="Tandem / Overview",
    text="Requests, objectives, latencies, workers: what to look at first.",
    rows=(
        Row(
            "Now",
            (
                number(
                    "Requests",
                    "Requests that ended in any state.",
                    "reqps",
                    rate("tandem_requests_total", model=True),
                    width=4,
                ),
                number(
                    "Failed",
                    "Share of the requests that were accepted and then failed.",
                    "percentunit",
                    f"{FAILED} or vector(0)",
                    width=4,
                    colours_from=((0.001, "orange"), (0.01, "red")),
                ),
                number(
                    "Objectives met",
                    "Share of requests that met the TTFT and TPOT objectives of their class; all classes.",
                    "percentunit",
                    ratio(
                        rate("tandem_slo_requests_total", 'outcome="met"', model=True),
                        rate("tandem_slo_requests_total", model=True),
                    ),
                    width=4,
                    maximum=1.0,
                    colour="red",
                    colours_from=((0.95, "orange"), (0.99, "green")),
                ),
                number(
                    "TTFT p99",
                    "Received to first token, of finished requests.",
                    "s",
                    percentile(0.99, "tandem_ttft_seconds"),
                    width=4,
                ),
                number(
                    "Workers",
                    "Workers that can take requests, in the view of the router with the fewest.",
                    "none",
                    f"min by (role) ({of('tandem_workers')})",
                    "{{role}}",
                    width=4,
                    colour="red",
                    colours_from=((1, "green"),),
                ),
                number(
                    "Waiting",
                    "Requests in the routers' queues.",
                    "none",
                    gauge("tandem_queued_requests"),
                    width=4,
                    colours_from=((64, "orange"), (512, "red")),
                ),
            ),
        ),
        Row(
            "Objectives",
            (
                lines(
                    "Goodput",
                    "Requests per second that met both the TTFT and the TPOT objective of their class.",
                    "reqps",
                    (GOODPUT, "{{class}}"),
                ),
                lines(
                    "Objectives met",
                    "Share of requests, by class.",
                    "percentunit",
                    (ATTAINED, "{{class}}"),
                    maximum=1.0,
                ),
                stack(
                    "Missed, by outcome",
                    "missed_ttft: queue or prefill. missed_tpot: decode batches too large, or prefill beside them. "
                    "failed: an error, or refused for lack of room.",
                    "reqps",
                    (rate("tandem_slo_requests_total", 'outcome!="met"', by="outcome", model=True), "{{outcome}}"),
                ),
            ),
        ),
        Row(
            "Requests",
            (
                stack(
                    "Requests by end",
                    "finished is good. rejected: refused before it reached a worker. failed: accepted, then an error.",
                    "reqps",
                    (rate("tandem_requests_total", by="state", model=True), "{{state}}"),
                ),
                stack(
                    "Errors by code",
                    "Error codes. overloaded: admission refused; the client may retry.",
                    "reqps",
                    (rate("tandem_requests_total", 'code!=""', by="code", model=True), "{{code}}"),
                ),
                lines(
                    "Tokens",
                    "Per second, of finished requests. cached is the part of prompt that was not computed again.",
                    "none",
                    (rate("tandem_tokens_total", by="kind", model=True), "{{kind}}"),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                percentiles(
                    "TTFT",
                    "Received to first token. Another dashboard shows where it goes.",
                    "tandem_ttft_seconds",
                    width=6,
                ),
                percentiles("TPOT", "Time per output token after the first.", "tandem_tpot_seconds", width=6),
                percentiles(
                    "ITL",
                    "Gap between two tokens of one answer. Far above TPOT: answers stall, then catch up.",
                    "tandem_itl_seconds",
                    width=6,
                ),
                percentiles(
                    "End to end",
                    "Received to finished; depends mostly on the length of the answer.",
                    "tandem_e2e_seconds",
                    width=6,
                ),
            ),
        ),
        Row(
            "Health",
            (
                lines(
                    "Workers up",
                    "1: linked to a router. 0: down, or still starting.",
                    "none",
                    (worker_gauge("tandem_worker_up", by="worker"), "{{worker}}"),
                    maximum=1.0,
                    width=6,
                ),
                lines(
                    "Workers by health",
                    "suspect still takes requests; ejected and probation take none. Summed over routers.",
                    "none",
                    (gauge("tandem_worker_health", by="role, state"), "{{role}} {{state}}"),
                    width=6,
                ),
                lines(
                    "Ejections and restarts",
                    "Ejections by routers, by reason; restarts by the controller.",
                    "none",
                    (increase("tandem_ejections_total", by="role, reason"), "{{role}} {{reason}}"),
                    (worker_gauge("tandem_worker_restarts_total", by="role"), "{{role}} restarts, total"),
                    width=6,
                ),
                lines(
                    "Retries",
                    "Requests queued again after a failure of a worker or a handoff; clients see no error.",
                    "reqps",
                    (rate("tandem_retries_total", by="code", model=True), "{{code}}"),
                    width=6,
                ),
            ),
        ),
        Row(
            "Routers",
            (
                lines(
                    "CPU",
                    "Cores that each router uses; a router can use one.",
                    "none",
                    (rate("process_cpu_seconds_total", by="instance"), "{{instance}}"),
                    width=6,
                ),
                lines(
                    "Memory",
                    "Resident memory of each router.",
                    "bytes",
                    (of("process_resident_memory_bytes"), "{{instance}}"),
                    width=6,
                ),
                lines(
                    "Event loop lag",
                    "Longest delay of each router's event loop. It delays every token.",
                    "s",
                    (of("tandem_event_loop_lag_seconds"), "{{instance}}"),
                    width=6,
                ),
                lines(
                    "Running",
                    "Requests on workers; versions of the routers.",
                    "none",
                    (gauge("tandem_running_requests"), "running"),
                    (f"count by (version) ({of('tandem_build_info')})", "routers of {{version}}"),
                    width=6,
                ),
            ),
        ),
    ),
)
