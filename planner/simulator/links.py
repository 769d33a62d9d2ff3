"""Computes when pushed KV arrives. Each worker sends and receives through one port, one range after the other.

A layer's blocks are sent as soon as the layer is computed, so computing can hide all transfers but the last layer's.
Handoff sessions are left out (docs/decisions/0016-what-the-simulator-leaves-out.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SimPort:
    """One direction of one worker's network. `slowdown` 2 means half the rate."""

    free_s: float = 0.0
    busy_s: float = 0.0
    moved_bytes: float = 0.0
    slowdown: float = 1.0


def push(
    source: SimPort, target: SimPort, *, start_s: float, end_s: float, layers: int, transfer_s: float, num_bytes: float
) -> float:
    """Reserves both ports for a range that is computed layer by layer from `start_s` to `end_s`; both are now if it is
    already computed. `transfer_s`: its transfer time on an idle link. Returns when the last byte arrives."""
    transfer_s *= max(source.slowdown, target.slowdown)
    first_layer_s = start_s + (end_s - start_s) / layers
    begin_s = max(first_layer_s, source.free_s, target.free_s)
    last_layer_s = transfer_s / layers if end_s > start_s else 0.0
    done_s = max(begin_s + transfer_s, end_s + last_layer_s)
    for port in (source, target):
        port.free_s = done_s
        port.busy_s += transfer_s
        port.moved_bytes += num_bytes
    return done_s
