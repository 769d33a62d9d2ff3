"""A finished request as a tree of spans: whole, without gaps to the first token, each stage under who did it."""

from itertools import pairwise

import pytest

from kvtransfer.causes import HandoffCause, HandoffFault
from router.observe.span_tree import CHAIN, span_tree
from router.observe.trace import Trace
from router.requests.output import Usage
from tandem.errors import ErrorCode
from tandem.request import RequestState
from tandem.telemetry.spans import FinishedSpan, Service
from tandem.v1 import worker_pb2

ZERO_S = 100.0  # the router's clock when the request was parsed
SENT = worker_pb2.SendStages(
    opened_s=0.001, computing_s=0.01, linked_s=0.005, first_piece_s=0.1, last_layer_s=0.4, last_ack_s=0.45,
    first_token_s=0.5, hidden_bytes=50,
)  # fmt: skip
RECEIVED = worker_pb2.ReceiveStages(
    reserved_s=0.001, linked_s=0.01, first_piece_s=0.1, last_piece_s=0.45, verified_s=0.46, first_token_s=0.52,
    joined_s=0.53,
)  # fmt: skip


def trace(prefill: str = "p0") -> Trace:
    """Arrived 0.02 s before it was parsed, sent out 0.1 s after that."""
    made = Trace("r", "m", 64, ZERO_S, arrived_s=ZERO_S - 0.02, received_unix_s=1_000_000.0)
    made.begin("r.1", prefill, "d0", ZERO_S + 0.1)
    return made


def handed_off(made: Trace, skew_s: float = 0.0) -> Trace:
    """`skew_s`: how much later than they were the workers' stages are drawn."""
    attempt = made.attempts[-1]
    attempt.reserved_s = attempt.prefill_sent_s = ZERO_S + 0.12
    made.report(worker_pb2.HandoffDone(request_id="r.1", bytes=100, received=RECEIVED), ZERO_S + 0.101 + skew_s)
    made.report(worker_pb2.HandoffDone(request_id="r.1", bytes=100, sent=SENT), ZERO_S + 0.125 + skew_s)
    attempt.computing_s, attempt.sampled_s = ZERO_S + 0.135 + skew_s, ZERO_S + 0.625 + skew_s
    attempt.first_token_s = ZERO_S + 0.63
    attempt.joined_s = ZERO_S + 0.64
    made.end(RequestState.FINISHED, None, Usage(64, 5, 16), ZERO_S + 1.0)
    return made


def named(spans: list[FinishedSpan]) -> dict[str, FinishedSpan]:
    return {each.name: each for each in spans}


def chain(spans: list[FinishedSpan]) -> list[FinishedSpan]:
    found = named(spans)
    return [found[name] for name in CHAIN if name in found]


@pytest.mark.parametrize("skew_s", [0.0, 0.02])
def test_the_chain_to_the_first_token_has_no_gap_and_is_the_time_to_it(skew_s: float) -> None:
    links = chain(span_tree(handed_off(trace(), skew_s), "router-0"))
    assert [each.name for each in links] == list(CHAIN)
    for before, after in pairwise(links):
        assert after.start_s == pytest.approx(before.end_s)
    assert sum(each.end_s - each.start_s for each in links) == pytest.approx(0.02 + 0.63)
    assert links[0].start_s == pytest.approx(1_000_000.0 - 0.02)


def test_every_stage_is_under_who_did_it() -> None:
    spans = span_tree(handed_off(trace()), "router-0")
    owners = {each.name: (each.service, each.instance) for each in spans}
    router, prefill, decode = (Service.ROUTER, "router-0"), (Service.PREFILL, "p0"), (Service.DECODE, "d0")
    assert owners == {
        "request": router, "parse": router, "queue": router, "attempt": router, "reserve": router, "dispatch": router,
        "first_token": router, "prefill": prefill, "connect": prefill, "pieces": decode, "verify": decode,
        "join": decode, "decode": decode,
    }  # fmt: skip
    assert [each.parent for each in spans[:4]] == [None, 0, 0, 0]
    assert {each.parent for each in spans[4:]} == {3}
    root, attempt = spans[0].attributes, spans[3].attributes
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (64, 5)
    assert root["tandem.ttft_s"] == pytest.approx(0.65)
    assert (attempt["tandem.handoff.bytes"], attempt["tandem.handoff.overlap_share"]) == (100, 0.5)


def test_a_local_prefill_is_the_decode_workers() -> None:
    made = trace(prefill="")
    made.attempts[-1].first_token_s = ZERO_S + 0.4
    made.end(RequestState.FINISHED, None, Usage(64, 5, 0), ZERO_S + 1.0)
    spans = span_tree(made, "router-0")
    assert named(spans)["prefill"].service is Service.DECODE
    assert sum(each.end_s - each.start_s for each in chain(spans)) == pytest.approx(0.42)
    assert named(spans)["decode"].start_s == pytest.approx(1_000_000.4)


def test_what_was_proposed_is_with_the_request() -> None:
    made = trace()
    made.end(RequestState.FINISHED, None, Usage(64, 5, 0, accepted_tokens=4, unused_tokens=2), ZERO_S + 1.0)
    root = span_tree(made, "router-0")[0].attributes
    assert (root["tandem.accepted_tokens"], root["tandem.unused_tokens"]) == (4, 2)
    assert "tandem.unused_tokens" not in span_tree(handed_off(trace()), "router-0")[0].attributes


def test_an_attempt_that_goes_on_elsewhere_is_linked_to_the_one_before() -> None:
    made = trace()
    made.failed(HandoffFault(HandoffCause.PEER_LOST, "a prompt's text must not come here"), ZERO_S + 0.3)
    made.begin("r.2", "p1", "d1", ZERO_S + 0.35)
    made.end(RequestState.FINISHED, None, Usage(64, 5, 0), ZERO_S + 1.0)
    spans = span_tree(made, "router-0")
    first, second = (number for number, each in enumerate(spans) if each.name == "attempt")
    assert spans[second].links == (first,)
    assert (spans[first].error, spans[second].error) == (ErrorCode.HANDOFF_FAILED.value, None)
    assert [each.end_s - each.start_s for each in spans if each.name == "queue"] == pytest.approx([0.1, 0.05])
    assert "text" not in repr(spans)


def test_a_request_that_never_left_the_queue_is_a_queue() -> None:
    made = Trace("r", "m", 64, ZERO_S, received_unix_s=0.0)
    made.end(RequestState.REJECTED, ErrorCode.OVERLOADED, None, ZERO_S + 2.0)
    spans = span_tree(made, "router-0")
    assert [each.name for each in spans] == ["request", "parse", "queue"]
    assert spans[0].error == ErrorCode.OVERLOADED.value
    assert spans[2].end_s - spans[2].start_s == pytest.approx(2.0)
