"""The query shapes of the dashboards. Every dashboard's variables select the series."""

from __future__ import annotations

WINDOW = "$__rate_interval"
QUANTILES = (0.5, 0.9, 0.99)
CLUSTER = 'namespace=~"$namespace",job=~"$job"'
MODEL = f'{CLUSTER},model=~"$model"'
OF_A_WORKER = ("namespace", "job", "model", "role", "worker")
OWN_LABELS = {
    "tandem_worker_blocks": ("state",),
    "tandem_worker_host_blocks": ("state",),
    "tandem_worker_host_moved_blocks_total": ("direction",),
    "tandem_worker_requests": ("state",),
    "tandem_worker_tokens_total": ("kind",),
    "tandem_worker_step_seconds_bucket": ("kind", "le"),
    "tandem_worker_link_bytes_total": ("peer", "transport"),
    "tandem_worker_link_bytes_per_second": ("peer", "transport"),
    "tandem_worker_link_latency_seconds": ("peer", "transport"),
}


def of(metric: str, more: str = "", *, model: bool = False) -> str:
    """The selected series of a metric that `more` matches."""
    matchers = ",".join(filter(None, (MODEL if model else CLUSTER, more)))
    return f"{metric}{{{matchers}}}"


def rate(metric: str, more: str = "", *, by: str = "", model: bool = False) -> str:
    """Per second, summed."""
    return total(f"rate({of(metric, more, model=model)}[{WINDOW}])", by=by)


def total(expr: str, *, by: str = "") -> str:
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"


def gauge(metric: str, more: str = "", *, by: str = "", model: bool = False) -> str:
    """The current value, summed."""
    return total(of(metric, more, model=model), by=by)


def percentile(quantile: float, histogram: str, more: str = "", *, by: str = "") -> str:
    """Of a histogram with the label `model`, in the histogram's unit."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({quantile}, {rate(f'{histogram}_bucket', more, by=labels, model=True)})"


def mean(histogram: str, more: str = "", *, by: str = "") -> str:
    """Of a histogram with the label `model`, in the histogram's unit."""
    summed, number = (rate(f"{histogram}_{part}", more, by=by, model=True) for part in ("sum", "count"))
    return f"{summed} / {number}"


def ratio(part: str, whole: str) -> str:
    """Empty while the whole is 0."""
    return f"{part} / ({whole} > 0)"


def worker_gauge(metric: str, more: str = "", *, by: str) -> str:
    """A gauge of the workers, summed. Every router exports every worker, so routers are not added up."""
    return total(each_worker(metric, of(metric, more, model=True)), by=by)


def worker_rate(metric: str, more: str = "", *, by: str, window: str = WINDOW) -> str:
    """A counter of the workers per second, summed."""
    return total(each_worker(metric, f"rate({of(metric, more, model=True)}[{window}])"), by=by)


def each_worker(metric: str, expr: str) -> str:
    """`expr` of a metric: one series for each worker and label value, however many routers export it."""
    return f"max by ({', '.join((*OF_A_WORKER, *OWN_LABELS.get(metric, ())))}) ({expr})"


def increase(metric: str, more: str = "", *, by: str, model: bool = False) -> str:
    """The increase over the window of a rate, summed."""
    return total(f"increase({of(metric, more, model=model)}[{WINDOW}])", by=by)
