"""Images of requests before they are placed: within the router's limits, and expanded by a worker."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from router.admission.parse_threads import FairSlots
from router.prefix_index.mirror import WorkerKey
from router.requests.deaths import MAX_DEATHS
from router.requests.dispatcher import Dispatcher
from router.workers.fleet import Worker
from tandem.config.model import Role
from tandem.engine.api import Capability
from tandem.errors import (
    DeadlineExceeded,
    InputError,
    OverloadedError,
    RequestQuarantined,
    TandemError,
    UnavailableError,
    UnsupportedField,
    WorkerDied,
    WorkerLost,
)
from tandem.images import MAX_IMAGES, MAX_IMAGES_BYTES, ExpandedPrompt
from tandem.request import check_length

EACH = 2  # requests that this router gives a worker at a time: it reads the images of one after another
MAX_WAITING = 256  # requests of a model for their turn; further ones are refused
SHARE_OF_ONE = 2  # one tenant may have half of them, and of the room for images
QUARANTINE_S = 300.0  # images are refused so long after MAX_DEATHS workers died that read them
MAX_SUSPECTS = 1024  # remembered
TIMEOUT_S = 60.0
POLL_S = 0.1  # while no worker is there
ATTEMPTS = 3
FIELD = "messages"


@dataclass(slots=True)
class _Deaths:
    """Of workers that read the same images."""

    count: int = 0
    last_s: float = 0.0

    def add(self) -> None:
        self.count = 1 if self.are_old else self.count + 1
        self.last_s = time.monotonic()

    @property
    def are_old(self) -> bool:
        return time.monotonic() - self.last_s > QUARANTINE_S

    @property
    def are_too_many(self) -> bool:
        return self.count >= MAX_DEATHS and not self.are_old


class ImageExpander:
    """Args: `dispatcher`: has the router's requests. `room_bytes`: of the images of all of them."""

    def __init__(self, dispatcher: Dispatcher, room_bytes: int) -> None:
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._room_bytes = room_bytes
        self._parsed_bytes: Counter[str] = Counter()  # by tenant, of requests on their way to the dispatcher
        self._slots: dict[str, FairSlots] = {}  # by model
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()  # by a digest of the images

    @contextmanager
    def held(self, tenant: str, images: Sequence[bytes], choices: int = 1) -> Iterator[None]:
        """Counts the images of a request until the dispatcher has it, once for each of its choices: each is sent to
        workers of its own. Raises InputError, OverloadedError."""
        check_length(FIELD, len(images), MAX_IMAGES)
        size = choices * sum(map(len, images))
        if size > MAX_IMAGES_BYTES:
            raise InputError(
                f"{FIELD}: expected at most {MAX_IMAGES_BYTES >> 20} MiB of images, for all choices together, got "
                f"{size} bytes: send smaller ones, or ask for fewer answers at a time",
                field=FIELD,
            )
        if size:
            self._check_room(tenant, size)
        self._parsed_bytes[tenant] += size
        try:
            yield
        finally:
            self._parsed_bytes[tenant] -= size
            if not self._parsed_bytes[tenant]:
                del self._parsed_bytes[tenant]

    def check(self, model: str) -> None:
        """Raises UnsupportedField for a model that takes no images."""
        if self.taken_by(model) is False:
            raise UnsupportedField(f"{FIELD}: expected text alone: no engine of {model} takes images", field=FIELD)

    def taken_by(self, model: str) -> bool | None:
        """Whether an engine of the model takes images; None while no worker is known."""
        workers = [each for each in self._fleet.workers() if each.listed and each.link.info.model == model]
        return any(Capability.IMAGES not in each.link.lacks for each in workers) if workers else None

    async def expand(
        self,
        model: str,
        tenant: str,
        cache_salt: bytes,
        deadline_s: float | None,
        prompt: Sequence[int],
        images: Sequence[bytes],
    ) -> ExpandedPrompt:
        """The prompt as the model's engines read it. Raises InputError, UnsupportedField, OverloadedError,
        UnavailableError, DeadlineExceeded, RequestQuarantined."""
        self._check_deaths(images)
        left_s = TIMEOUT_S if deadline_s is None else min(TIMEOUT_S, deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                return await self._expand(model, tenant, cache_salt, prompt, images)
        except TimeoutError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise DeadlineExceeded("the deadline passed while the images were read") from None
            raise UnavailableError(f"{FIELD}: no worker has read the images; retry later", retry_after_s=1.0) from None

    async def _expand(
        self, model: str, tenant: str, cache_salt: bytes, prompt: Sequence[int], images: Sequence[bytes]
    ) -> ExpandedPrompt:
        slots, failed = self._slots_of(model), set[WorkerKey]()
        last: TandemError = UnavailableError("there is none")
        if slots.waiting >= MAX_WAITING:
            raise _full(f"the images of {MAX_WAITING} requests wait to be read")
        if slots.waiting_of(tenant) >= (most := MAX_WAITING // SHARE_OF_ONE):
            raise _full(f"the images of {most} requests of one tenant wait to be read")
        while len(failed) < ATTEMPTS:
            await slots.take(tenant, sum(map(len, images)))
            if (worker := self._worker(model, failed)) is None:
                slots.release()
                if self._able(model):
                    break  # all that are there have failed
                await asyncio.sleep(POLL_S)
                continue
            try:
                wire_id, answer = worker.link.expand(prompt, images, cache_salt)
            except WorkerLost as error:
                slots.release()
                failed.add(worker.key)
                last = error
                continue
            answer.add_done_callback(lambda done: _ended(done, slots))  # the worker is busy until then
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                worker.link.cancel(wire_id)
                raise
            except WorkerDied as error:  # perhaps of these images
                self._died(images)
                raise UnavailableError(
                    f"{FIELD}: the worker that read the images died; retry later", retry_after_s=1.0
                ) from error
            except UnavailableError as error:  # it was lost, or has too many to read
                failed.add(worker.key)
                last = error
        raise UnavailableError(f"{FIELD}: no worker has read the images: {last.message}", retry_after_s=1.0)

    def _slots_of(self, model: str) -> FairSlots:
        if model not in self._slots:
            self._slots[model] = FairSlots(lambda: EACH * max(1, len(self._able(model))))
        return self._slots[model]

    def _able(self, model: str, failed: Collection[WorkerKey] = ()) -> list[Worker]:
        """Prefill workers, which compute the images too; without any, decode workers."""
        for role in (Role.PREFILL, Role.DECODE):
            ready = (each for each in self._fleet.ready(model, role) if each.key not in failed)
            if able := [each for each in ready if Capability.IMAGES not in each.link.lacks]:
                return able
        return []

    def _worker(self, model: str, failed: set[WorkerKey]) -> Worker | None:
        able = self._able(model, failed)
        return min(able, key=lambda each: (each.link.expanding, each.running_requests), default=None)

    def _check_deaths(self, images: Sequence[bytes]) -> None:
        """Raises RequestQuarantined. Images are hashed only while some are suspected."""
        while self._deaths and next(iter(self._deaths.values())).are_old:
            self._deaths.popitem(last=False)
        if self._deaths and (deaths := self._deaths.get(_digest(images))) is not None and deaths.are_too_many:
            raise RequestQuarantined(
                f"{FIELD}: {deaths.count} workers died while they read these images, which may be the cause: they are "
                f"read by no other for {QUARANTINE_S:g} s"
            )

    def _died(self, images: Sequence[bytes]) -> None:
        digest = _digest(images)
        self._deaths.setdefault(digest, _Deaths()).add()
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MAX_SUSPECTS:
            self._deaths.popitem(last=False)

    def _check_room(self, tenant: str, size: int) -> None:
        """Raises OverloadedError."""
        held = Counter(self._parsed_bytes)
        for run in (*self._dispatcher.running(), *self._dispatcher.waiting()):
            if run.request.images:
                held[run.terms.tenant] += sum(len(image.data) for image in run.request.images)
        if held.total() + size > self._room_bytes:
            raise _full(f"the images of the requests here take {self._room_bytes >> 20} MiB")
        if held[tenant] + size > (most := self._room_bytes // SHARE_OF_ONE):
            raise _full(f"the images of the requests of one tenant here take {most >> 20} MiB")


def _full(what: str) -> OverloadedError:
    return OverloadedError(f"{FIELD}: {what}, which is the most: retry later", retry_after_s=1.0)


def _digest(images: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(len(image).to_bytes(8, "little"))
        digest.update(image)
    return digest.digest()


def _ended(answer: asyncio.Future[ExpandedPrompt], slots: FairSlots) -> None:
    if not answer.cancelled():
        answer.exception()  # the caller may be gone
    slots.release()
