"""What requests tell of their workers' health."""

from __future__ import annotations

from collections.abc import Sequence

from router.requests.output import Final
from router.requests.run import RequestRun
from router.workers.fleet import Worker
from router.workers.health import HealthBoard

LATENCY_TOKENS = 64  # prefill latency is that of so many tokens; of a shorter prompt it is the whole
LEAST_TOKENS = 8  # a shorter answer says nothing of the time per token


def prefilled(board: HealthBoard, run: RequestRun, worker: Worker, tokens: int, now_s: float) -> None:
    """The prefill worker's first token is there; it computed `tokens`, after those that it was given before."""
    sent_s = run.trace.attempts[-1].prefill_sent_s
    latency_s = None
    if sent_s is not None:
        began_s = max(sent_s, worker.last_prefill_s)
        latency_s = (now_s - began_s) * LATENCY_TOKENS / max(tokens, LATENCY_TOKENS)
    worker.last_prefill_s = now_s
    board.succeeded(worker.key, now_s, latency_s)


def finished(board: HealthBoard, run: RequestRun, final: Final, now_s: float) -> None:
    if run.decode is None:
        return
    tokens = final.usage.completion_tokens
    whole = len(run.trace.attempts) == 1 and tokens >= LEAST_TOKENS
    board.succeeded(run.decode.key, now_s, final.timeline.decode_s / (tokens - 1) if whole else None)


def blamed(board: HealthBoard, run: RequestRun, worker_ids: Sequence[str], now_s: float) -> None:
    for worker in (run.decode, run.prefill):
        if worker is not None and worker.key.worker_id in worker_ids:
            board.failed(worker.key, now_s)
