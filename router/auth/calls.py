"""Who may call what, for every edge: authenticates, grants terms, counts what is used, and writes it down."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from router.auth.audit import AuditLine, AuditLog, utc_now
from router.auth.cache_salt import CacheSalts
from router.auth.call import Call
from router.auth.jwt_tokens import UnknownSigningKey
from router.auth.principal import ANYBODY, Access, Principal
from router.auth.rate_limits import RateLimiter
from router.auth.sources import KeySources
from router.terms import PRIORITY, TENANT, RequestTerms
from tandem.clock import Clock
from tandem.config.auth import AuthSpec
from tandem.errors import ConfigError, PermissionDenied, TandemError


class Calls:
    """Args:
    salt_secret: the cluster's, for tenants' cache salts; None: one of this router alone.
    on_refused: told of each call that is not let in.
    """

    def __init__(
        self, auth: AuthSpec, salt_secret: str | None, clock: Clock, on_refused: Callable[[TandemError], None]
    ) -> None:
        """Reads the files that `auth` names. Raises ConfigError."""
        self._clock = clock
        self._on_refused = on_refused
        self._sources = KeySources(auth, clock) if auth.required else None
        self._limiter = RateLimiter(clock)
        self._salts = CacheSalts(salt_secret or secrets.token_hex(32))
        self._audit = None if auth.audit_log is None else _audit_log(auth.audit_log)
        self.is_watching = auth.required or self._audit is not None  # else calls pass without further ado

    def start(self) -> None:
        if self._sources is not None:
            self._sources.start()

    async def close(self) -> None:
        if self._sources is not None:
            await self._sources.close()
        if self._audit is not None:
            self._audit.close()

    # ---- at the door

    def begin(self, method: str, access: Access, source: str, request_id: str, trace_id: str) -> Call:
        return Call(method, access, source, request_id, trace_id, self._clock.now_s())

    async def let_in(self, call: Call, authorization: str | None) -> None:
        """Says who calls. Raises Unauthenticated, PermissionDenied, UnavailableError."""
        try:
            try:
                self.identify(call, authorization)
            except UnknownSigningKey:
                if self._sources is None:
                    raise
                await self._sources.freshen()
                self.identify(call, authorization)
        except TandemError as error:
            call.code = error.code
            self._on_refused(error)
            raise

    def identify(self, call: Call, authorization: str | None) -> None:
        """As `let_in`, with the keys there are."""
        if self._sources is not None:
            call.principal = self._sources.authenticator.identify(authorization, call.access)
            call.tenant = call.principal.tenant

    def over(self, call: Call) -> None:
        """Its answer is out, and its requests have ended."""
        self._limiter.spend_tokens(call.principal, call.completion_tokens)
        if self._audit is not None:
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

    # ---- what it may

    def grant(self, call: Call, terms: RequestTerms, classes: Sequence[str], *, class_is_named: bool) -> RequestTerms:
        """What the client asked for, as far as its key allows it; takes one request off its limit.

        Raises PermissionDenied naming the header, RateLimited.
        """
        who = call.principal
        if who is not ANYBODY:
            terms = replace(
                terms, tenant=_tenant(who, terms), priority=_priority(who, terms, classes, class_is_named), call=call
            )
        else:
            terms = replace(terms, call=call)
        call.tenant = terms.tenant
        self.take_request(call)
        return terms

    def take_request(self, call: Call) -> None:
        """Raises RateLimited."""
        self._limiter.take_request(call.principal)

    def check_prompt(self, call: Call, tokens: int) -> None:
        """Raises RateLimited."""
        self._limiter.check_tokens(call.principal, tokens)

    def took_prompt(self, call: Call, model: str, tokens: int) -> None:
        call.model, call.prompt_tokens = model, call.prompt_tokens + tokens
        self._limiter.spend_tokens(call.principal, tokens)

    def cache_salt(self, terms: RequestTerms | None, client_salt: str) -> bytes:
        """A tenant that the client only claims to be has no salt: whoever named it could share its blocks."""
        tenant = "" if self._sources is None or terms is None else terms.tenant
        return self._salts.salt(tenant, client_salt)


def _tenant(who: Principal, terms: RequestTerms) -> str:
    if terms.tenant and terms.tenant != who.tenant and not who.admin:
        raise PermissionDenied(
            f"{TENANT}: the tenant is that of the key, {who.tenant!r}; leave the header out", field=TENANT
        )
    return terms.tenant or who.tenant


def _priority(who: Principal, terms: RequestTerms, classes: Sequence[str], is_named: bool) -> str:
    if who.priorities is None or terms.priority in who.priorities:
        return terms.priority
    allowed = [each for each in classes if each in who.priorities]
    if is_named or not allowed:
        known = ", ".join(repr(each) for each in allowed) or "none"
        raise PermissionDenied(f"{PRIORITY}: the key allows {known}, not {terms.priority!r}", field=PRIORITY)
    return allowed[0]


def _audit_log(target: str) -> AuditLog:
    try:
        return AuditLog(target)
    except OSError as error:
        field = "security.auth.audit_log"
        raise ConfigError(f"{field}: {target}: {error.strerror}", field=field) from None
