"""One client's call while it is on its way: who asks, and what it came to. It goes with the requests it makes."""

from __future__ import annotations

from dataclasses import dataclass

from router.auth.principal import ANYBODY, Access, Principal
from tandem.errors import ErrorCode
from tandem.request import RequestState

MAX_MODEL_CHARS = 128


@dataclass(slots=True, eq=False)
class Call:
    """`method` is the route or gRPC method; `source` is where the connection comes from. `request_id`: of what it asked
    for last; before that, over HTTP the id that its answer shows, over gRPC the client's own, if it sent one."""

    method: str
    access: Access
    source: str
    request_id: str
    trace_id: str
    began_s: float
    principal: Principal = ANYBODY
    tenant: str = ""
    model: str = ""
    state: RequestState | None = None
    code: ErrorCode | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def asks(self, model: str) -> None:
        """Clients may name models that there are not."""
        self.model = model[:MAX_MODEL_CHARS]

    def ended(self, state: RequestState, code: ErrorCode | None, completion_tokens: int) -> None:
        """One of its requests has. Of several, the first that did not finish is told of."""
        self.completion_tokens += completion_tokens
        if self.state in (None, RequestState.FINISHED):
            self.state, self.code = state, code

    @property
    def outcome(self) -> str:
        if self.state is not None:
            return self.state.value
        return "ok" if self.code is None else RequestState.REJECTED.value
