"""Empties the workers of a machine that was told to end, before it does: its pod is deleted, its Ray node drained."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.control.controller import Controller

log = logging.getLogger(__name__)

POLL_S = 0.5


class Leaving:
    """`run` ends only when it is cancelled. What `tandem scale` and others do meanwhile is not waited for: the machine
    does not wait either."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._under_way: set[str] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for worker_id in await self._look():
                    if worker_id not in self._under_way:
                        self._under_way.add(worker_id)
                        tasks.create_task(self._leave(worker_id))
                await asyncio.sleep(POLL_S)

    async def _look(self) -> frozenset[str]:
        try:
            return await self._controller.backend.leaving()
        except Exception:  # whatever is wrong now, the next look may find machines that leave
            log.exception("which machines leave is not known; workers there would be lost with them")
            return frozenset()

    async def _leave(self, worker_id: str) -> None:
        try:
            await self._empty_and_place_anew(worker_id)
        except Exception:  # a fault of ours with one worker must not end the looking
            log.exception("%s could not leave its machine", worker_id)
        finally:
            self._under_way.remove(worker_id)

    async def _empty_and_place_anew(self, worker_id: str) -> None:
        """Its requests are moved, or end; its next life is on another machine, as soon as one has room."""
        if (slot := self._controller.slots.get(worker_id)) is None:
            return
        log.info("%s is emptied: its machine was told to end", worker_id)
        epoch = slot.epoch
        await self._controller.live_ratio.empty(slot, move=True)
        if slot.epoch == epoch and self._controller.slots.get(worker_id) is slot:
            slot.next_life("its machine was told to end")
            self._controller.backend.place_anew(worker_id)
