"""A finished span, as whoever measured it knows it. Pure: `tandem/telemetry/tracing.py` makes OpenTelemetry of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Service(StrEnum):
    """`service.name` of what did the work."""

    ROUTER = "tandem-router"
    PREFILL = "tandem-prefill"
    DECODE = "tandem-decode"


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """Times are Unix seconds. `parent` and `links` are places in the list that the span is part of, before its own;
    `parent` None: the root. `error`: a short word for what went wrong."""

    name: str
    service: Service
    instance: str
    start_s: float
    end_s: float
    parent: int | None
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    links: tuple[int, ...] = ()
    error: str | None = None
