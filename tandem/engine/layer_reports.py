"""Reports finished KV to the exporter once the device has written it, while the host launches the rest of the step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from tandem.engine.api import KvExporter
from tandem.engine.device.events import DeviceEvent
from tandem.errors import InternalError
from tandem.scheduler.plan import ExportRange

log = logging.getLogger(__name__)

Report = Callable[[], None]
MAX_FAILED = 1024  # exports: far more than are under way


class LayerReports:
    """A `KvExporter` in front of another, which a thread of its own calls in the same order. An export of which a
    report fails is reported no more, so its receiver never takes it for complete; the others go on.

    Args:
        record: records an event behind all work launched so far. A report waits for its event. None: launched work is
            done, so reports are made at once, by the caller.
    """

    def __init__(self, exporter: KvExporter, record: Callable[[], DeviceEvent] | None) -> None:
        self._exporter = exporter
        self._record = record
        self._queue: SimpleQueue[tuple[DeviceEvent, Report] | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None  # started with the first report
        self._unflushed = False
        self._error: BaseException | None = None  # of the device
        self._exports: tuple[str, ...] = ()  # of the step that is reported
        self._failed: dict[str, None] = {}  # the oldest first
        self._new: SimpleQueue[str] = SimpleQueue()  # of them, those that `flush` has not returned

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self._make(partial(self._begin_step, ranges))

    def layer_done(self, layer: int) -> None:
        self._make(partial(self._layer_done, layer))

    def flush(self) -> frozenset[str]:
        """Waits until all reports are made. Returns the requests whose exports failed since the last call. Raises
        InternalError if the device failed."""
        if self._unflushed:
            made = threading.Event()
            self._queue.put(made)
            made.wait()
            self._unflushed = False
        if self._error is not None:
            raise InternalError(f"finished KV layers could not be reported: {self._error}") from self._error
        return frozenset(self._new.get() for _ in range(self._new.qsize()))

    def _begin_step(self, ranges: Sequence[ExportRange]) -> None:
        kept = [each for each in ranges if each.request_id not in self._failed]
        self._exports = tuple(each.request_id for each in kept)
        if kept:
            self._guarded(partial(self._exporter.begin_step, kept))

    def _layer_done(self, layer: int) -> None:
        if self._exports:
            self._guarded(partial(self._exporter.layer_done, layer))

    def _guarded(self, report: Report) -> None:
        try:
            report()
        except Exception:
            log.exception("finished KV layers could not be reported", extra={"exports": len(self._exports)})
            for request_id in self._exports:
                self._failed[request_id] = None
                self._new.put(request_id)
            self._exports = ()
            while len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]

    def _make(self, report: Report) -> None:
        if self._record is None:
            report()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="layer-reports", daemon=True)
            self._thread.start()
        self._unflushed = True
        self._queue.put((self._record(), report))

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
            elif self._error is None:
                self._report(*item)

    def _report(self, event: DeviceEvent, report: Report) -> None:
        try:
            event.synchronize()
            report()
        except Exception as error:  # `flush` raises it
            self._error = error
