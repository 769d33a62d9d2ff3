"""When pushed KV arrives: each worker sends and receives over one port, one range after the other.

The piece timing of the handoff, without its sessions (docs/decisions/0016-what-the-simulator-leaves-out.md): a
layer's blocks go as soon as that layer is computed, so all but the last layer's may be hidden behind the computing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Port:
    """One direction of one worker. `slowdown` 2 means half the rate."""

    free_s: float = 0.0
    busy_s: float = 0.0
    moved_bytes: float = 0.0
    slowdown: float = 1.0


def push(
    source: Port, target: Port, *, start_s: float, end_s: float, layers: int, transfer_s: float, num_bytes: float
) -> float:
    """Books a range that is computed layer by layer from `start_s` to `end_s`, or is there already when both are now.
    `transfer_s` is what it takes on an idle link. Returns when the last byte is there."""
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
