"""What is cached, whether requests find it, and whether the routers' indexes agree."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Row, lines, number, stack
from deploy.grafana.promql import increase, of, rate, ratio, worker_gauge, worker_rate

HIT_RATE = ratio(
    rate("tandem_tokens_total", 'kind="cached"', model=True), rate("tandem_tokens_total", 'kind="prompt"', model=True)
)
WRONG = ratio(
    rate("tandem_index_credit_tokens_total", 'kind="wrong"', model=True),
    rate("tandem_index_credit_tokens_total", 'kind="given"', model=True),
)

CACHE = Dashboard(
    uid="tandem-cache",
    title="Tandem / Cache",
    text="Prefix cache and prefix index (docs/routing.md).",
    rows=(
        Row(
            "Now",
            (
                number(
                    "Hit rate",
                    "Share of prompt tokens that were cached on the worker that prefilled the request.",
                    "percentunit",
                    HIT_RATE,
                    maximum=1.0,
                ),
                number(
                    "Wrong credit",
                    "Share of the tokens reported as cached by the index that had to be computed. Some are normal: "
                    "blocks may be evicted between decision and prefill.",
                    "percentunit",
                    WRONG,
                    maximum=1.0,
                    colours_from=((0.05, "orange"), (0.2, "red")),
                ),
                number(
                    "Redis",
                    "Whether it answers every router. If not, the indexes no longer change, and requests continue.",
                    "bool_yes_no",
                    f"min({of('tandem_index_redis_up')})",
                    maximum=1.0,
                    colour="red",
                    colours_from=((1, "green"),),
                ),
                number(
                    "Workers in the index",
                    "In the router with the fewest. Fewer than there are workers: snapshots are missing.",
                    "none",
                    f"min({of('tandem_index_workers')})",
                ),
            ),
        ),
        Row(
            "Hits",
            (
                lines("Hit rate", "Share of prompt tokens.", "percentunit", (HIT_RATE, "hit rate"), maximum=1.0),
                lines(
                    "Prompt tokens",
                    "Per second. Tokens that are not cached are computed.",
                    "none",
                    (rate("tandem_tokens_total", 'kind=~"prompt|cached"', by="kind", model=True), "{{kind}}"),
                ),
                lines(
                    "Credit",
                    "Prompt tokens per second that the index reported as cached, and those of them that were not.",
                    "none",
                    (rate("tandem_index_credit_tokens_total", by="kind", model=True), "{{kind}}"),
                ),
            ),
        ),
        Row(
            "Blocks",
            (
                stack(
                    "Prefill pool",
                    "KV blocks by state. Only cached blocks can be evicted.",
                    "none",
                    (worker_gauge("tandem_worker_blocks", 'role="prefill"', by="state"), "{{state}}"),
                ),
                stack(
                    "Decode pool",
                    "KV blocks by state. Only cached blocks can be evicted.",
                    "none",
                    (worker_gauge("tandem_worker_blocks", 'role="decode"', by="state"), "{{state}}"),
                ),
                lines(
                    "Cached, by worker",
                    "Blocks of finished requests that later ones can reuse.",
                    "none",
                    (worker_gauge("tandem_worker_blocks", 'state="cached"', by="worker"), "{{worker}}"),
                ),
            ),
        ),
        Row(
            "Host tier",
            (
                stack(
                    "Slots",
                    "Slots of workers with engine.host_kv_memory_bytes.",
                    "none",
                    (worker_gauge("tandem_worker_host_blocks", by="role, state"), "{{role}} {{state}}"),
                ),
                lines(
                    "Blocks moved",
                    "Per second. Many out and few in: slots are overwritten before reuse; the tier is too small.",
                    "none",
                    (worker_rate("tandem_worker_host_moved_blocks_total", by="direction"), "{{direction}}"),
                ),
                lines(
                    "Tokens found",
                    "Per second, found in the tier instead of computed.",
                    "none",
                    (worker_rate("tandem_worker_host_hit_tokens_total", by="role"), "{{role}}"),
                ),
            ),
        ),
        Row(
            "Index",
            (
                lines(
                    "Blocks in the index",
                    "Distinct blocks in each router's index. Routers should agree.",
                    "none",
                    (of("tandem_index_blocks"), "{{instance}}"),
                ),
                stack(
                    "Faults",
                    "Times a worker's entries were discarded or unreadable; the router reloads them.",
                    "none",
                    (increase("tandem_index_faults_total", by="fault"), "{{fault}}"),
                ),
                lines(
                    "Blocks that did not fit",
                    "Per second. The index is full: raise router.index_memory_bytes (20 bytes for each cached block).",
                    "none",
                    (rate("tandem_index_lost_blocks_total", by="instance"), "{{instance}}"),
                ),
            ),
        ),
    ),
)
