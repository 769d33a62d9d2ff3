"""Marks in a device's queue of work, for which a host thread can wait."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceEvent(Protocol):
    def synchronize(self) -> None:
        """Waits until the device has done all work that was launched before the event was recorded. Raises if the
        device failed."""
        ...


class _Done:
    """On a CPU, launched work is done."""

    def synchronize(self) -> None:
        """Returns at once."""


DONE: DeviceEvent = _Done()


def record_event(device: torch.device, *, blocking: bool = False) -> DeviceEvent:
    """Records an event on the device's current stream. Args: `blocking`: a waiting thread sleeps instead of polling."""
    if device.type != "cuda":
        return DONE
    event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
