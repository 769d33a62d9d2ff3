"""How full the pools are, how well the devices are used, what it costs, and which pool should grow."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Row, lines, number, stack
from deploy.grafana.promql import MODEL, gauge, rate, ratio, worker_gauge, worker_rate

HELD = ratio(
    worker_gauge("tandem_worker_blocks", 'state=~"leased|in_use"', by="role"),
    worker_gauge("tandem_worker_blocks", by="role"),
)
LONG_STEPS = f"histogram_quantile(0.99, {worker_rate('tandem_worker_step_seconds_bucket', by='le, role, kind')})"


def used(work: str, peak: str) -> str:
    """The share of a device's peak over the last 5 minutes, including idle time."""
    return ratio(worker_rate(work, by="role, worker", window="5m"), worker_gauge(peak, by="role, worker"))


CAPACITY = Dashboard(
    uid="tandem-capacity",
    title="Tandem / Capacity",
    text="Requests that wait for prefill need prefill workers; refusals by decode workers need decode workers.",
    rows=(
        Row(
            "Now",
            (
                number(
                    "KV in use",
                    "Share of a pool's blocks held by requests; the rest is free or can be evicted.",
                    "percentunit",
                    HELD,
                    "{{role}}",
                    maximum=1.0,
                    colours_from=((0.8, "orange"), (0.95, "red")),
                ),
                number(
                    "Generated tokens",
                    "Tokens per second of finished requests.",
                    "none",
                    rate("tandem_tokens_total", 'kind="completion"', model=True),
                ),
                number(
                    "Cost per hour",
                    "Cost of the workers that are up; needs observability.cost.",
                    "none",
                    f"sum(max by (namespace, job, model, role) (tandem_cost_per_hour{{{MODEL}}}))",
                ),
                number(
                    "Cost of a million tokens",
                    "Per million generated tokens, over the last 5 minutes; needs observability.cost.",
                    "none",
                    f"max by (model) (tandem_cost_per_million_tokens{{{MODEL}}})",
                    "{{model}}",
                ),
            ),
        ),
        Row(
            "Which pool is short",
            (
                lines(
                    "Running and waiting",
                    "Requests on workers and in the routers' queues.",
                    "none",
                    (gauge("tandem_running_requests"), "running"),
                    (gauge("tandem_queued_requests"), "waiting"),
                ),
                lines(
                    "Waits by reason",
                    "prefill_full: add prefill workers. decode_refused: add decode workers or KV memory.",
                    "reqps",
                    (rate("tandem_waits_total", by="reason", model=True), "{{reason}}"),
                ),
                lines(
                    "KV in use",
                    "Share of a pool's blocks held by requests.",
                    "percentunit",
                    (HELD, "{{role}}"),
                    maximum=1.0,
                ),
                lines(
                    "Requests on workers",
                    "waiting: for a step. running: in the batch. reserved: blocks leased for a handoff.",
                    "none",
                    (worker_gauge("tandem_worker_requests", by="role, state"), "{{role}} {{state}}"),
                ),
                lines(
                    "Prompt tokens to compute",
                    "Prompt tokens still to compute on each pool.",
                    "none",
                    (worker_gauge("tandem_worker_waiting_tokens", by="role"), "{{role}}"),
                ),
                lines(
                    "Preemptions",
                    "Requests that lost their blocks to others: decode blocks are full.",
                    "none",
                    (worker_rate("tandem_worker_preemptions_total", by="role"), "{{role}}"),
                ),
            ),
        ),
        Row(
            "Work",
            (
                lines(
                    "Tokens computed",
                    "Per second, by worker. prefill on a decode worker is local prefill.",
                    "none",
                    (worker_rate("tandem_worker_tokens_total", by="worker, kind"), "{{worker}} {{kind}}"),
                ),
                lines(
                    "Step time, p99",
                    "Duration of engine steps. mixed: prefill and decode together; delays all answers in the batch.",
                    "s",
                    (LONG_STEPS, "{{role}} {{kind}}"),
                ),
                stack(
                    "Blocks",
                    "KV blocks of both pools by state.",
                    "none",
                    (worker_gauge("tandem_worker_blocks", by="role, state"), "{{role}} {{state}}"),
                ),
                lines(
                    "MFU",
                    "Share of peak compute, including idle time. It limits prefill.",
                    "percentunit",
                    (used("tandem_worker_flops_total", "tandem_worker_peak_flops"), "{{worker}}"),
                ),
                lines(
                    "MBU",
                    "Share of peak memory bandwidth, including idle time. It limits decode.",
                    "percentunit",
                    (
                        used("tandem_worker_memory_bytes_total", "tandem_worker_peak_memory_bytes_per_second"),
                        "{{worker}}",
                    ),
                ),
                lines(
                    "MFU and MBU of steps",
                    "Over the steps of the last 15 s.",
                    "percentunit",
                    (worker_gauge("tandem_worker_mfu_ratio", by="worker"), "{{worker}} MFU"),
                    (worker_gauge("tandem_worker_mbu_ratio", by="worker"), "{{worker}} MBU"),
                ),
            ),
        ),
        Row(
            "Cost",
            (
                lines(
                    "Per hour",
                    "Currency of observability.cost, by role.",
                    "none",
                    (f"max by (model, role) (tandem_cost_per_hour{{{MODEL}}})", "{{model}} {{role}}"),
                    width=12,
                ),
                lines(
                    "Per million generated tokens",
                    "Over the last 5 minutes.",
                    "none",
                    (f"max by (model) (tandem_cost_per_million_tokens{{{MODEL}}})", "{{model}}"),
                    width=12,
                ),
            ),
        ),
    ),
)
