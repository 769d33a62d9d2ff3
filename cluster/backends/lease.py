"""The lease of a cluster on Ray: one controller at a time has it, and only that one may start and stop members.

Without Ray, so that it can be tested: `LeaseActor` is the body of an actor, `Lease` the controller's side of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

RENEWAL_S = 2.0  # for the actor's answer
TAKING_S = 60.0  # the actor may have to be started first
FORGET_S = 5.0
LEASE_S = 10.0  # a controller that has not renewed for so long may be replaced by that of another keeper


class StaleController(Exception):
    """A later controller holds the lease."""


class Fence:
    """Refuses calls of a controller after one of a later controller."""

    def __init__(self) -> None:
        self.lease = 0

    def check(self, lease: int) -> None:
        if lease < self.lease:
            raise StaleController(f"lease {lease} ended: a later controller of this cluster holds {self.lease}")
        self.lease = lease


class Store(Protocol):
    """Keeps one text for longer than the process that writes it. Its calls may block, and raise anything."""

    def read(self) -> str:
        """Empty: there is none."""
        ...

    def write(self, text: str) -> None: ...


class LatestWriter:
    """Writes to a store in a thread of its own, of several texts the last: the store may be away for minutes."""

    def __init__(self, store: Store, retry_s: float = 1.0) -> None:
        self._store = store
        self._retry_s = retry_s
        self._text: str | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="store", daemon=True).start()

    def write(self, text: str) -> None:
        with self._changed:
            self._text = text
            self._changed.notify()

    def wait_written(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._text is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._text is not None)
                text = self._text or ""
            try:
                self._store.write(text)
            except Exception as error:
                log.warning("cannot store the cluster's record, trying again: %s", error)
                time.sleep(self._retry_s)
                continue
            with self._changed:
                if self._text == text:
                    self._text = None
                    self._changed.notify_all()


class LeaseActor:
    """The lease and the record of one cluster. Leases grow, also when Ray has restarted this actor or the clock was
    set back.

    Args: `store` keeps both if the node of this actor is lost.
    """

    def __init__(
        self,
        unix_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
        store: Store | None = None,
    ) -> None:
        self._unix_s = unix_s
        self._monotonic_s = monotonic_s
        self._fence = Fence()
        self._holder = ""
        self._renewed_s = 0.0
        self._fence.lease, self._record = parted(store.read()) if store is not None else (0, "")
        self._writer = LatestWriter(store) if store is not None else None

    def take(self, holder: str, after: int) -> int:
        """The new lease; 0: another holder has it. `holder` names the keeper, which has one controller at a time.
        `after`: the last lease that the keeper knows, in case that Ray has restarted this actor."""
        if self._holder not in ("", holder) and self._monotonic_s() - self._renewed_s < LEASE_S:
            return 0
        lease = max(int(self._unix_s() * 1000), self._fence.lease + 1, after + 1)
        self._fence.check(lease)
        self._holder, self._renewed_s = holder, self._monotonic_s()
        return lease

    def check(self, lease: int) -> None:
        self._fence.check(lease)

    def renew(self, lease: int, holder: str, record: str) -> None:
        """`record`: in case that Ray has restarted this actor."""
        self._fence.check(lease)
        self._holder, self._renewed_s = holder, self._monotonic_s()
        self._record = self._record or record

    def keep(self, lease: int, record: str) -> None:
        self._fence.check(lease)
        self._record = record
        if self._writer is not None:
            self._writer.write(stamped(lease, record))

    def forget(self) -> None:
        """Nothing is to be taken over."""
        self._record = ""
        if self._writer is not None:
            self._writer.write("")
            self._writer.wait_written(FORGET_S)

    def kept(self) -> str:
        return self._record


class Lease:
    """A lease that was taken. Its calls raise StaleController if it ended, TimeoutError or what Ray raises."""

    def __init__(self, number: int, holder: str, actor: Any) -> None:
        self.number = number
        self._holder = holder
        self._actor = actor

    @classmethod
    async def take(cls, holder: str, after: int, actor: Any) -> Lease | None:
        """None: another holder has it."""
        async with asyncio.timeout(TAKING_S):
            number = await actor.take.remote(holder, after)
        return cls(number, holder, actor) if number else None

    async def check(self) -> None:
        """Comes before every call that starts, stops or reserves: actors that a later controller took over have not
        heard of it yet, and placement groups never do."""
        async with asyncio.timeout(LEASE_S):
            await self._actor.check.remote(self.number)

    async def renew(self, record: str) -> None:
        async with asyncio.timeout(RENEWAL_S):
            await self._actor.renew.remote(self.number, self._holder, record)

    async def keep(self, record: str) -> None:
        async with asyncio.timeout(LEASE_S):
            await self._actor.keep.remote(self.number, record)


def stamped(lease: int, record: str) -> str:
    """A record for the keeper, with the lease of its writer."""
    return f"{lease} {record}"


def parted(kept: str) -> tuple[int, str]:
    """Lease and record of what the keeper kept; 0 and nothing if there was none."""
    lease, _, record = kept.partition(" ")
    return int(lease or 0), record
