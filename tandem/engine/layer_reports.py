"""Reports finished KV to the exporter once the device has written it, while the host launches the rest of the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from tandem.engine.api import KvExporter
from tandem.engine.device.events import DeviceEvent
from tandem.errors import InternalError
from tandem.scheduler.plan import ExportRange

Report = Callable[[], None]


class LayerReports:
    """A `KvExporter` in front of another, which a thread of its own calls in the same order.

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
        self._error: BaseException | None = None

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self._make(partial(self._exporter.begin_step, ranges))

    def layer_done(self, layer: int) -> None:
        self._make(partial(self._exporter.layer_done, layer))

    def flush(self) -> None:
        """Waits until all reports are made. Raises InternalError if one failed; none was made after it."""
        if self._unflushed:
            made = threading.Event()
            self._queue.put(made)
            made.wait()
            self._unflushed = False
        if self._error is not None:
            raise InternalError(f"finished KV layers could not be reported: {self._error}") from self._error

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
