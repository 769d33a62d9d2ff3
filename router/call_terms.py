"""The terms of a gRPC call: its metadata, and its deadline."""

from __future__ import annotations

from typing import Any

from router.service import RouterService
from router.terms import Terms


def call_terms(service: RouterService, context: Any) -> Terms:
    """Raises InputError naming the metadata key."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return service.terms(metadata.get, context.time_remaining())
