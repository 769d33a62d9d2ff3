"""One call of a client: its principal, what it may still use, and its outcome. All its requests refer to it."""

from __future__ import annotations

from dataclasses import dataclass

from router.auth.principal import ANONYMOUS, AccessLevel, Principal
from router.auth.rate_limits import RateLimiter
from tandem.errors import ErrorCode
from tandem.request import RequestState

MAX_MODEL_CHARS = 128


@dataclass(slots=True, eq=False)
class Call:
    """`method` is the route or gRPC method, `source` the address of the client. `request_id` is that of the call's last
    request; before its first request it is the id in the HTTP answer, or over gRPC the id that the client sent."""

    method: str
    access: AccessLevel
    source: str
    request_id: str
    trace_id: str
    began_s: float
    limiter: RateLimiter
    principal: Principal = ANONYMOUS
    tenant: str = ""
    model: str = ""
    state: RequestState | None = None
    code: ErrorCode | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spent_tokens: int = 0  # of them, counted against the limits of the key
    is_unlogged: bool = False  # it was refused because the audit log had no room for it
    is_counted: bool = False  # against the limit of its key, before the terms of its request are parsed
    is_detached: bool = False  # what it runs outlives the client's connection, and finishes it

    def name_model(self, model: str) -> None:
        """The model that the client names, which may not exist."""
        self.model = model[:MAX_MODEL_CHARS]

    def take_request(self) -> None:
        """Counts one request against the limit of the key. Raises RateLimited."""
        self.limiter.take_request(self.principal)

    def check_prompt(self, tokens: int) -> None:
        """Raises RateLimited."""
        self.limiter.check_tokens(self.principal, tokens)

    def add_prompt(self, model: str, tokens: int) -> None:
        """Counts tokens of a prompt; gives them back if there are less than none."""
        self.model, self.prompt_tokens = model, self.prompt_tokens + tokens
        self.limiter.spend_tokens(self.principal, tokens)

    def ended(self, state: RequestState, code: ErrorCode | None, completion_tokens: int) -> None:
        """One of its requests ended. The call reports the first request that did not finish, if there is one."""
        self.completion_tokens += completion_tokens
        if self.state in (None, RequestState.FINISHED):
            self.state, self.code = state, code

    def refused(self, code: ErrorCode) -> None:
        """One of its requests was refused, or failed, which `ended` may have told before."""
        self.ended(RequestState.REJECTED, code, 0)

    @property
    def outcome(self) -> str:
        if self.state is not None:
            return self.state.value
        return "ok" if self.code is None else RequestState.REJECTED.value
