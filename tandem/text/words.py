"""Formats counts, sizes, durations and workers' names for people."""

from __future__ import annotations

import math

_ROLES = ("prefill", "decode")


def named_role(worker_id: str) -> str | None:
    """The role in the id: the one that the worker had when it first started. None: the id names none."""
    word = worker_id.rpartition("-")[0].rpartition("-")[2]
    return word if word in _ROLES else None


def worker_name(worker_id: str, role: str) -> str:
    """The id, and the role if the id names the other one: `prefill-1 (decode)`. The id alone is what commands take."""
    return worker_id if named_role(worker_id) in (role, None) else f"{worker_id} ({role})"


def worker_path(prefill_worker: str, decode_worker: str, local: str = "") -> str:
    """`prefill-0 → decode-0`. Without a prefill worker: the decode worker and `local`."""
    decode = worker_name(decode_worker, "decode")
    return f"{worker_name(prefill_worker, 'prefill')} → {decode}" if prefill_worker else f"{decode}{local}"


def plural(count: int, noun: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(count_bytes: float | None) -> str:
    """A transferred size in decimal units, as is usual for links. (Memory sizes are in MiB.)"""
    if count_bytes is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count_bytes >= scale:
            return f"{count_bytes / scale:.{0 if count_bytes >= 100 * scale else 1}f} {unit}"
    return f"{count_bytes:.0f} B"


def seconds(value: float | None) -> str:
    """A duration in milliseconds or, from 1 s on, in seconds."""
    if value is None or math.isnan(value):
        return "–"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"
