"""Finished spans. Pure: `tandem/telemetry/tracing.py` converts them to OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Service(StrEnum):
    """`service.name` of the process that did the work."""

    ROUTER = "tandem-router"
    PREFILL = "tandem-prefill"
    DECODE = "tandem-decode"


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """Times are Unix seconds.

    `parent` and `links` are indices of earlier spans in the same list; `parent` None is the root. `error` is a short
    name of the failure.
    """

    name: str
    service: Service
    instance: str
    start_s: float
    end_s: float
    parent: int | None
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    links: tuple[int, ...] = ()
    error: str | None = None
