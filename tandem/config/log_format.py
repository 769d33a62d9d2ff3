"""How log lines are written. Apart from the configuration, for processes that are to stay small."""

from __future__ import annotations

from enum import StrEnum


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
