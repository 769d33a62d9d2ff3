"""The engine's adapters, as the directory wants them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint.adapter import copied_adapter
from tandem.clock import Clock
from tandem.engine.api import AdapterFiles, Engine
from tandem.errors import TandemError
from tandem.v1 import worker_pb2
from worker.inbox import AdapterCopied

log = logging.getLogger(__name__)

KEPT_S = 60.0  # after it left the directory: requests may be on their way that routers took before they heard of that
RETRY_S = 30.0  # after a failure


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str
    at_s: float


class LoadedAdapters:
    """Copies an adapter's files in a thread of `copying`, then loads it between two steps.

    Args:
        tell: takes the result of a copy, from its thread; `copied` gets it then in the leader's.
    """

    def __init__(self, engine: Engine, clock: Clock, copying: Executor, tell: Callable[[AdapterCopied], None]) -> None:
        self._engine = engine
        self._clock = clock
        self._copying = copying
        self._tell = tell
        self._wanted: dict[str, AdapterFiles] = {}
        self._copies: set[str] = set()  # fingerprints of those that are being copied
        self._left_s: dict[str, float] = {}  # when each loaded one left the directory
        self._failed: dict[str, _Failed] = {}

    @property
    def failed(self) -> dict[str, str]:
        """Fingerprints, with the reason of the last failure."""
        return {each: failure.why for each, failure in self._failed.items()}

    def want(self, adapters: tuple[AdapterFiles, ...]) -> None:
        self._wanted = {each.fingerprint: each for each in adapters}
        self._failed = {each: failure for each, failure in self._failed.items() if each in self._wanted}
        now_s = self._clock.now_s()
        self._left_s = {
            each: self._left_s.get(each, now_s) for each in self._engine.adapters if each not in self._wanted
        }
        known = self._engine.adapters | self._failed.keys() | self._copies
        for adapter in [each for fingerprint, each in self._wanted.items() if fingerprint not in known]:
            self._copy(adapter)

    def _copy(self, adapter: AdapterFiles) -> None:
        self._copies.add(adapter.fingerprint)
        self._copying.submit(lambda: self._tell(_copied(adapter)))

    def copied(self, result: AdapterCopied) -> bool:
        """Loads the adapter. Returns whether requests may name one more now."""
        adapter, failure = result.adapter, result.failure
        self._copies.discard(adapter.fingerprint)
        if adapter.fingerprint not in self._wanted:
            return False
        if not failure:
            try:
                self._engine.load_adapter(adapter)
                self._failed.pop(adapter.fingerprint, None)
                return True
            except TandemError as error:
                failure = error.message
        log.error("an adapter cannot be loaded: %s", failure)
        self._failed[adapter.fingerprint] = _Failed(failure, self._clock.now_s())
        return False

    def tick(self) -> bool:
        """Tries failed ones again, and drops those that left the directory long ago. Returns whether it dropped one."""
        now_s = self._clock.now_s()
        for fingerprint, failure in self._failed.items():
            if now_s - failure.at_s >= RETRY_S and fingerprint not in self._copies:
                self._copy(self._wanted[fingerprint])
        due = [each for each, since_s in self._left_s.items() if now_s - since_s >= KEPT_S]
        dropped = [each for each in due if self._engine.drop_adapter(each)]
        for each in dropped:
            del self._left_s[each]
        return bool(dropped)

    def frame(self) -> worker_pb2.Adapters:
        return worker_pb2.Adapters(fingerprints=sorted(self._engine.adapters))


def _copied(adapter: AdapterFiles) -> AdapterCopied:
    try:
        copy = copied_adapter(Path(adapter.folder), adapter.fingerprint)
        return AdapterCopied(AdapterFiles(adapter.fingerprint, str(copy)))
    except TandemError as error:
        return AdapterCopied(adapter, error.message)
    except Exception as error:
        log.exception("an adapter could not be copied")
        return AdapterCopied(adapter, f"{adapter.folder}: {error}")
