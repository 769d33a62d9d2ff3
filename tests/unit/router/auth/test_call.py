"""The outcome of a call with several answers, and the source of a gRPC call."""

from __future__ import annotations

import pytest

from router.auth.call import Call
from router.auth.grpc_gate import source_of
from router.auth.principal import AccessLevel
from router.auth.rate_limits import RateLimiter
from tandem.errors import ErrorCode
from tandem.request import RequestState
from tandem.testing.models import FakeClock

FINISHED, REJECTED, CANCELLED = RequestState.FINISHED, RequestState.REJECTED, RequestState.CANCELLED


@pytest.mark.parametrize(
    ("ends", "outcome", "code"),
    [
        ([], "ok", None),
        ([(FINISHED, None)], "finished", None),
        ([(FINISHED, None), (CANCELLED, ErrorCode.CANCELLED), (FINISHED, None)], "cancelled", ErrorCode.CANCELLED),
        # One was refused, which cancelled the others.
        ([(REJECTED, ErrorCode.OVERLOADED), (CANCELLED, ErrorCode.CANCELLED)], "rejected", ErrorCode.OVERLOADED),
    ],
)
def test_a_call_reports_its_first_answer_that_did_not_finish(
    ends: list[tuple[RequestState, ErrorCode | None]], outcome: str, code: ErrorCode | None
) -> None:
    call = Call("POST /x", AccessLevel.CALLER, "", "", "", 0.0, RateLimiter(FakeClock()))
    for state, error in ends:
        call.ended(state, error, 3)
    assert (call.outcome, call.code, call.completion_tokens) == (outcome, code, 3 * len(ends))


@pytest.mark.parametrize(
    ("peer", "source"),
    [("ipv4:10.0.0.7:5000", "10.0.0.7"), ("ipv6:%5B::1%5D:5000", "::1"), ("ipv6:[::1]:5000", "::1"), ("unix:", "unix")],
)
def test_the_source_is_the_peers_address(peer: str, source: str) -> None:
    class Context:
        def peer(self) -> str:
            return peer

    assert source_of(Context()) == source
