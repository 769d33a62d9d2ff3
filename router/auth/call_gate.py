"""Authenticates calls on arrival, and on their end counts their tokens and writes the audit log. For every edge."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from router.auth.call import Call
from router.auth.jwt_tokens import UnknownSigningKey
from router.auth.key_refresh import KeyRefresh
from router.auth.principal import AccessLevel, CacheSalts
from router.auth.rate_limits import RateLimiter
from tandem.clock import Clock
from tandem.config.auth import AuthSpec
from tandem.errors import TandemError
from tandem.telemetry.audit import AuditLine, AuditLog, utc_now


class CallGate:
    """Args:
    router_id: names this process in the audit log's chain.
    salt_secret: the cluster's secret for cache salts; None: a secret of this router alone.
    on_refused: called for each call that fails authentication.
    """

    def __init__(
        self,
        auth: AuthSpec,
        router_id: str,
        salt_secret: str | None,
        clock: Clock,
        on_refused: Callable[[TandemError], None],
    ) -> None:
        """Reads the files that `auth` names. Raises ConfigError."""
        self._clock = clock
        self._on_refused = on_refused
        self._keys = KeyRefresh(auth, clock) if auth.required else None
        self._limiter = RateLimiter(clock)
        self._audit = AuditLog.of(auth, router_id)
        self.salts = CacheSalts(salt_secret or secrets.token_hex(32))
        self.is_watching = auth.required or self._audit is not None  # else the edges create no calls

    def start(self) -> None:
        if self._keys is not None:
            self._keys.start()

    async def close(self) -> None:
        if self._keys is not None:
            await self._keys.close()
        if self._audit is not None:
            self._audit.close()

    def begin(self, method: str, access: AccessLevel, source: str, request_id: str, trace_id: str) -> Call:
        return Call(method, access, source, request_id, trace_id, self._clock.now_s(), self._limiter)

    async def authenticate(self, call: Call, authorization: str | None, *, is_again: bool = False) -> None:
        """Sets the principal. `is_again`: before a further request of a call that began, whose line is due. Raises
        Unauthenticated, PermissionDenied, UnavailableError."""
        try:
            self._require_audit(call, is_again=is_again)
            try:
                self.identify(call, authorization)
            except UnknownSigningKey:
                if self._keys is None:
                    raise
                await self._keys.refresh()
                self.identify(call, authorization)
        except TandemError as error:
            call.code = error.code
            self._on_refused(error)
            raise

    def _require_audit(self, call: Call, *, is_again: bool) -> None:
        if self._audit is None:
            return
        call.is_unlogged = not is_again
        self._audit.require_room()
        call.is_unlogged = False

    def identify(self, call: Call, authorization: str | None) -> None:
        """As `authenticate`, with the keys that are loaded alone."""
        if self._keys is not None:
            call.principal = self._keys.identify(authorization, call.access)
            call.tenant = call.principal.tenant

    def spend(self, call: Call) -> None:
        """Counts what its requests that ended have answered since the last time."""
        self._limiter.spend_tokens(call.principal, call.completion_tokens - call.spent_tokens)
        call.spent_tokens = call.completion_tokens

    def finish(self, call: Call) -> None:
        """Its answer is complete, and its requests have ended."""
        self.spend(call)
        if self._audit is not None and not call.is_unlogged:
            self._audit.write(
                AuditLine(
                    time=utc_now(),
                    request_id=call.request_id,
                    trace_id=call.trace_id,
                    key_id=call.principal.key_id,
                    tenant=call.tenant,
                    source=call.source,
                    method=call.method,
                    model=call.model,
                    outcome=call.outcome,
                    code=None if call.code is None else call.code.value,
                    prompt_tokens=call.prompt_tokens,
                    completion_tokens=call.completion_tokens,
                    duration_s=round(self._clock.now_s() - call.began_s, 6),
                )
            )
