"""Logging of every Tandem process: one line per event on stderr, as text or JSON.

Modules log through `logging.getLogger(__name__)`. Fields passed as `extra={...}` become `key=value` pairs (text) or
members (JSON). So do `request` and `trace_id` in a task that serves one request (tandem/telemetry/log_context.py).
Prompts and outputs are never logged. Only a process's `__main__` calls `setup_logging`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from tandem.config.log_format import LogFormat
from tandem.telemetry.log_context import log_names

TRACEBACK_S = 60.0
KEPT_KINDS = 256
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Libraries that log too much at info.
_QUIET = ("grpc", "asyncio", "uvicorn", "httpx", "httpcore", "urllib3")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """The record's extra fields, and those of the task's request unless the record is about another one."""
    # Fields with a leading underscore come from libraries; Ray adds a timestamp to each record.
    own = {key: value for key, value in vars(record).items() if key not in _STANDARD and key[0] != "_"}
    return own if "request" in own else {**log_names(), **own}


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={value}" for key, value in _extra(record).items())
        head = f"{_when(record)} {record.levelname.lower():7} {self._process}: {record.getMessage()}{pairs}"
        return f"{head}\n{self.formatException(record.exc_info)}" if record.exc_info else head


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def error_told(line: str) -> str:
    """What a log's line says after `error: `, by which a process tells why it ends; empty if it says no such thing."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        line = f": {json.loads(line)['message']}"
    return line.partition(": error: ")[2]


class RareTracebacks(logging.Filter):
    """Lets a traceback pass once a minute for each kind, which is the exception's class and where it was raised. The
    others become fields: a client can cause many a second, of hundreds of lines each."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._shown_s: OrderedDict[tuple[str, str, int], float] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or (error := record.exc_info[1]) is None or not self._is_repeated(error):
            return True
        record.exc_info = record.exc_text = None
        record.exception = f"{type(error).__name__}: {error}"
        record.traceback = f"shown less than {TRACEBACK_S:g} s ago"
        return True

    def _is_repeated(self, error: BaseException) -> bool:
        now_s, last = self._now_s(), error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        raised_at = ("", 0) if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
        kind = (type(error).__name__, *raised_at)
        if (shown_s := self._shown_s.get(kind)) is not None and now_s - shown_s < TRACEBACK_S:
            return True
        self._shown_s[kind] = now_s
        self._shown_s.move_to_end(kind)
        if len(self._shown_s) > KEPT_KINDS:
            self._shown_s.popitem(last=False)
        return False


def setup_logging(level: str = "info", *, process: str, log_format: LogFormat = LogFormat.TEXT) -> None:
    """Sends this process's logs to stderr. `level` is a key of LEVELS; an unknown level raises KeyError."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format is LogFormat.JSON else TextFormatter(process))
    handler.addFilter(RareTracebacks())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))
