"""The terms of a gRPC call: its metadata, and its deadline."""

from __future__ import annotations

from typing import Any

from router.auth.grpc_gate import call_of
from router.service import RouterService
from router.terms import RequestTerms


def call_terms(service: RouterService, context: Any) -> RequestTerms:
    """Raises InputError naming the metadata key; PermissionDenied, RateLimited; Unauthenticated where a key has ended
    since the call began."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    call = call_of(context)
    if call is not None:
        service.calls.identify(call, metadata.get("authorization"))
    return service.terms(metadata.get, context.time_remaining(), call)
