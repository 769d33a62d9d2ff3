"""How a client wants its request served: class, tenant, deadline. All edges read the same headers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from router.auth.call import Call
from router.auth.principal import Principal
from router.request_ids import client_request_id
from tandem.clock import Clock
from tandem.config.router import ClassSpec
from tandem.errors import InputError, PermissionDenied
from tandem.telemetry.trace_context import TraceContext, TraceSampler

PRIORITY = "x-tandem-priority"
TENANT = "x-tandem-tenant"
TIMEOUT = "x-request-timeout-s"
REQUEST_ID = "x-request-id"
MAX_TIMEOUT_S = 86_400.0

_TENANT = re.compile(r"[\w.:@-]{1,64}", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """The class, tenant and deadline of one request, and its origin.

    Args:
        priority: class name.
        tenant: empty if the client named none.
        deadline_s: on the router's clock; None for no deadline.
        arrived_s: arrival time, before parsing; None if not measured.
        trace: the client's trace context, or a new one if the request is sampled; else None.
        call: the authenticated call; None without authentication.
        client_id: the client's x-request-id, by which its trace can be found.
    """

    priority: str
    tenant: str = ""
    deadline_s: float | None = None
    arrived_s: float | None = field(default=None, compare=False)
    trace: TraceContext | None = None
    call: Call | None = None
    client_id: str = field(default="", compare=False)


class TermsParser:
    def __init__(self, classes: Sequence[ClassSpec], clock: Clock, sampler: TraceSampler | None = None) -> None:
        self.names = tuple(each.name for each in classes)
        self._clock = clock
        self._sampler = sampler or TraceSampler(None)

    def parse(
        self, header: Callable[[str], str | None], remaining_s: float | None = None, call: Call | None = None
    ) -> RequestTerms:
        """Parses a request's headers.

        Args:
            header: gives the value of a header by its lower-case name.
            remaining_s: the deadline of the transport (gRPC), if any.
            call: limits the terms to those that its key allows.

        Raises InputError, PermissionDenied naming the header.
        """
        terms = self._parse(header, remaining_s)
        if call is None:
            return terms
        call.tenant = _tenant(call.principal, terms)
        priority = self._priority(call.principal, terms, is_named=header(PRIORITY) is not None)
        return replace(terms, tenant=call.tenant, priority=priority, call=call)

    def _parse(self, header: Callable[[str], str | None], remaining_s: float | None) -> RequestTerms:
        priority, tenant, timeout = header(PRIORITY), header(TENANT), header(TIMEOUT)
        arrived_s, trace = self._clock.now_s(), self._sampler.context(header)
        client_id = client_request_id(header(REQUEST_ID))
        if priority is None and tenant is None and timeout is None and remaining_s is None:
            return RequestTerms(self.names[0], arrived_s=arrived_s, trace=trace, client_id=client_id)
        if priority is not None and priority not in self.names:
            known = ", ".join(repr(name) for name in self.names)
            raise InputError(f"{PRIORITY}: expected one of {known}, got {priority[:40]!r}", field=PRIORITY)
        if tenant is not None and not _TENANT.fullmatch(tenant):
            raise InputError(f"{TENANT}: expected 1 to 64 letters, digits and _.:@-, got {tenant[:80]!r}", field=TENANT)
        limits = [each for each in (timeout_s(timeout), remaining_s) if each is not None]
        return RequestTerms(
            priority=self.names[0] if priority is None else priority,
            tenant=tenant or "",
            deadline_s=None if not limits else arrived_s + min(*limits, MAX_TIMEOUT_S),
            arrived_s=arrived_s,
            trace=trace,
            client_id=client_id,
        )

    def _priority(self, principal: Principal, terms: RequestTerms, *, is_named: bool) -> str:
        """Without a named class, the first one that the key allows."""
        if principal.priorities is None or terms.priority in principal.priorities:
            return terms.priority
        allowed = [each for each in self.names if each in principal.priorities]
        if is_named or not allowed:
            known = ", ".join(repr(each) for each in allowed) or "none"
            raise PermissionDenied(f"{PRIORITY}: the key allows {known}, not {terms.priority!r}", field=PRIORITY)
        return allowed[0]


def _tenant(principal: Principal, terms: RequestTerms) -> str:
    if terms.tenant and terms.tenant != principal.tenant and not principal.admin:
        raise PermissionDenied(
            f"{TENANT}: the tenant is that of the key, {principal.tenant!r}; leave the header out", field=TENANT
        )
    return terms.tenant or principal.tenant


def timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    value = float(text) if _SECONDS.fullmatch(text) else math.nan
    if not 0 < value <= MAX_TIMEOUT_S:
        raise InputError(
            f"{TIMEOUT}: expected a number of seconds above 0 and at most {MAX_TIMEOUT_S:g}, got {text[:40]!r}",
            field=TIMEOUT,
        )
    return value
