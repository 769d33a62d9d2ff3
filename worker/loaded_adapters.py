"""The engine's adapters, as the directory wants them."""

from __future__ import annotations

import logging
from collections import deque

from tandem.clock import Clock
from tandem.engine.api import AdapterFiles, Engine
from tandem.errors import TandemError
from tandem.v1 import worker_pb2

log = logging.getLogger(__name__)

KEPT_S = 60.0  # after it left the directory: requests may be on their way that routers took before they heard of that


class LoadedAdapters:
    """Loads one at a time, so that answers go on in between. `failed`: fingerprints with the reason."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._wanted: frozenset[str] = frozenset()
        self._to_load: deque[AdapterFiles] = deque()
        self._left_s: dict[str, float] = {}  # when each loaded one left the directory
        self.failed: dict[str, str] = {}

    def want(self, adapters: tuple[AdapterFiles, ...]) -> None:
        """What failed is not tried again while the directory has it."""
        self._wanted = frozenset(each.fingerprint for each in adapters)
        self.failed = {each: why for each, why in self.failed.items() if each in self._wanted}
        known = self._engine.adapters | self.failed.keys()
        self._to_load = deque({each.fingerprint: each for each in adapters if each.fingerprint not in known}.values())
        now_s = self._clock.now_s()
        self._left_s = {
            each: self._left_s.get(each, now_s) for each in self._engine.adapters if each not in self._wanted
        }

    @property
    def is_loading(self) -> bool:
        return bool(self._to_load)

    def load_next(self) -> bool:
        """Returns whether there was one to load."""
        if not self._to_load:
            return False
        adapter = self._to_load.popleft()
        try:
            self._engine.load_adapter(adapter)
        except TandemError as error:
            log.error("the adapter in %s cannot be loaded: %s", adapter.folder, error.message)
            self.failed[adapter.fingerprint] = error.message
        return True

    def drop_old(self) -> bool:
        """Returns whether one was dropped."""
        now_s = self._clock.now_s()
        due = [each for each, since_s in self._left_s.items() if now_s - since_s >= KEPT_S]
        dropped = [each for each in due if self._engine.drop_adapter(each)]
        for each in dropped:
            del self._left_s[each]
        return bool(dropped)

    def frame(self) -> worker_pb2.Adapters:
        return worker_pb2.Adapters(fingerprints=sorted(self._engine.adapters))
