"""Computes when pushed KV arrives. Each worker sends and receives through one port, one range after the other.

A port is the links of the worker's ranks; it is busy as long as the rank that moves most. A layer's blocks are sent as
soon as the layer is computed, so computing can hide all transfers but the last layer's. Handoff sessions are left out
(docs/decisions/0016-what-the-simulator-leaves-out.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from kvtransfer.session.reshard import reshard_plan


@dataclass(slots=True)
class SimPort:
    """One direction of one worker's network. `slowdown` 2 means half the rate."""

    free_s: float = 0.0
    busy_s: float = 0.0
    moved_bytes: float = 0.0
    slowdown: float = 1.0


@cache
def busiest_shares(prefill_tp: int, decode_tp: int, kv_heads: int) -> tuple[float, float]:
    """Of a range's KV, what the prefill rank that sends most sends, and what each decode rank receives. Decode ranks
    beyond the KV heads receive copies, so a prefill rank may send more than the range has."""
    sent, received = Counter[int](), Counter[int]()
    for link in reshard_plan(prefill_tp, decode_tp, kv_heads):
        sent[link.prefill_rank] += link.head_count
        received[link.decode_rank] += link.head_count
    return max(sent.values()) / kv_heads, max(received.values()) / kv_heads


def push(
    source: SimPort,
    target: SimPort,
    *,
    start_s: float,
    end_s: float,
    layers: int,
    send_s: float,
    receive_s: float,
    num_bytes: float,
) -> float:
    """Reserves both ports for a range that is computed layer by layer from `start_s` to `end_s`; both are now if it is
    already computed. `send_s`, `receive_s`: its time on either port, idle. Returns when the last byte arrives: with the
    slower port. The faster one is free for other workers before."""
    first_layer_s = start_s + (end_s - start_s) / layers
    begin_s = max(first_layer_s, source.free_s, target.free_s)
    for port, seconds in ((source, send_s), (target, receive_s)):
        seconds *= port.slowdown
        last_layer_s = seconds / layers if end_s > start_s else 0.0
        port.free_s = max(begin_s + seconds, end_s + last_layer_s)
        port.busy_s += seconds
        port.moved_bytes += num_bytes
    return max(source.free_s, target.free_s)
