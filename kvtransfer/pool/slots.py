"""Memory of pieces under way, on the host and on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from kvtransfer.causes import HandoffCause, HandoffFault

LEAST_IDS = 1024
_MASK = (1 << 64) - 1


class Slot:
    """Of one piece: its digest, then its block ids at both ends."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.host = torch.empty(capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.empty(capacity, dtype=torch.int64, device=device)
        self.view = self.host.numpy()
        self.used: tuple[object, ...] = ()  # what the kernel reads must live as long as it

    @property
    def digest(self) -> int:
        """Once the device has ended the piece."""
        return int(self.view[0]) & _MASK


class Slots:
    """Keeps slots for later pieces. Used by all threads."""

    def __init__(self, device: torch.device, make: Callable[[int, torch.device], Slot] = Slot) -> None:
        self._device = device
        self._make = make
        self._free: list[Slot] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Slot:
        """Of at least `size` numbers. Raises HandoffFault (transport) without memory."""
        with self._lock:
            for index, slot in enumerate(self._free):
                if len(slot.view) >= size:
                    return self._free.pop(index)
        try:
            return self._make(max(LEAST_IDS, 1 << (size - 1).bit_length()), self._device)
        except RuntimeError as error:  # without pinned memory; a device that is lost shows in other operations too
            message = f"pool: no memory for the ids of a piece's blocks: {str(error).splitlines()[0]}"
            raise HandoffFault(HandoffCause.TRANSPORT, message) from error

    def give_back(self, slot: Slot) -> None:
        slot.used = ()
        with self._lock:
            self._free.append(slot)
