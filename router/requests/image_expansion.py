"""Images of requests before they are placed: within the router's limits, and expanded by a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.prefix_index.mirror import WorkerKey
from router.requests.dispatcher import Dispatcher
from router.workers.fleet import Worker
from tandem.config.model import Role
from tandem.engine.api import Capability
from tandem.errors import InputError, OverloadedError, UnavailableError, UnsupportedField, WorkerLost
from tandem.images import MAX_IMAGES, MAX_IMAGES_BYTES, ExpandedPrompt
from tandem.request import check_length

AT_ONCE = 8  # of this router: a worker reads one image after another
TIMEOUT_S = 30.0
ATTEMPTS = 3


class ImageExpander:
    """Args: `dispatcher`: has the router's requests. `room_bytes`: of the images of all of them."""

    def __init__(self, dispatcher: Dispatcher, room_bytes: int) -> None:
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._room_bytes = room_bytes
        self._expanding_bytes = 0
        self._turns = asyncio.Semaphore(AT_ONCE)

    def check(self, model: str, images: Sequence[bytes]) -> None:
        """Before anything is made of a request. Raises InputError, UnsupportedField, OverloadedError."""
        workers = [each for each in self._fleet.workers() if each.listed and each.link.info.model == model]
        if workers and all(Capability.IMAGES in each.link.lacks for each in workers):
            raise UnsupportedField(
                f"messages: expected text alone: no engine of {model} takes images", field="messages"
            )
        check_length("images", len(images), MAX_IMAGES)
        size = sum(map(len, images))
        if size > MAX_IMAGES_BYTES:
            raise InputError(
                f"images: expected at most {MAX_IMAGES_BYTES >> 20} MiB in a request, got {size} bytes: send smaller "
                "ones",
                field="images",
            )
        if self._expanding_bytes + self._held_bytes() + size > self._room_bytes:
            raise OverloadedError(
                f"images: those of the requests here take {self._room_bytes >> 20} MiB, the most they may: retry later",
                retry_after_s=1.0,
            )

    async def expand(self, model: str, prompt: Sequence[int], images: Sequence[bytes]) -> ExpandedPrompt:
        """The prompt as the model's engines read it. Raises InputError, UnsupportedField, UnavailableError."""
        size = sum(map(len, images))
        self._expanding_bytes += size
        try:
            async with self._turns:
                return await self._expand(model, prompt, images)
        finally:
            self._expanding_bytes -= size

    async def _expand(self, model: str, prompt: Sequence[int], images: Sequence[bytes]) -> ExpandedPrompt:
        failed: set[WorkerKey] = set()
        for _ in range(ATTEMPTS):
            worker = self._worker(model, failed)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await worker.link.expand(prompt, images)
            except (WorkerLost, TimeoutError):
                failed.add(worker.key)
        raise UnavailableError(
            "images: the workers that read them were lost or too slow; retry later", retry_after_s=1.0
        )

    def _worker(self, model: str, failed: set[WorkerKey]) -> Worker:
        ready = [each for role in (Role.PREFILL, Role.DECODE) for each in self._fleet.ready(model, role)]
        able = [each for each in ready if Capability.IMAGES not in each.link.lacks and each.key not in failed]
        if not able:
            raise UnavailableError("images: no worker can read them now; retry later", retry_after_s=1.0)
        return min(able, key=lambda each: (each.role is Role.DECODE, each.running_requests))

    def _held_bytes(self) -> int:
        """A file counts once for all choices of a request."""
        runs = (*self._dispatcher.running(), *self._dispatcher.waiting())
        files = {id(image.data): len(image.data) for run in runs for image in run.request.images}
        return sum(files.values())
