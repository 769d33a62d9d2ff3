"""Format of log lines. Does not import pydantic, so that small processes such as the transfer agent can use it."""

from __future__ import annotations

from enum import StrEnum


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
