"""Facts about requests, and the bus on which observers subscribe to them.

An observer never changes what happens to a request. One that raises is logged once, counted, and skipped for that fact.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from router.policies.types import Placement, WaitReason
from router.requests import actions as act
from router.requests.state_machine import RequestRun
from tandem.errors import TandemError

log = logging.getLogger(__name__)


class Arrived(act.Fact, frozen=True):
    """The request was parsed; admission decides next."""


class Placed(act.Fact, frozen=True):
    """It goes to workers now."""

    placement: Placement


class Waited(act.Fact, frozen=True):
    """At the head of the queue, it could not be placed, for another reason than before."""

    reason: WaitReason


class Requeued(act.Fact, frozen=True):
    """Its attempt is over, and it waits again. `refused`: there was no room; no worker failed."""

    cause: TandemError
    refused: bool


F = TypeVar("F")
_Handler = Callable[[RequestRun, Any, float], None]


class Facts:
    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # by observer
        self._handlers: dict[type, list[tuple[str, _Handler]]] = {}

    def subscribe(self, fact: type[F], observer: str, handler: Callable[[RequestRun, F, float], None]) -> None:
        """`handler` gets the run, the fact and the time in the router's clock; those subscribed first are called first.
        `observer` names it in logs and in the metric tandem_observer_failures."""
        self._handlers.setdefault(fact, []).append((observer, handler))

    def publish(self, run: RequestRun, fact: act.Fact, now_s: float) -> None:
        for observer, handler in self._handlers.get(type(fact), ()):
            try:
                handler(run, fact, now_s)
            except Exception:  # a fault of one observer must not touch the request or the other observers
                if not self.failures[observer]:
                    log.exception("an observer failed; further failures are only counted", extra={"observer": observer})
                self.failures[observer] += 1
