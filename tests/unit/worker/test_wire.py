"""What a router sends is checked again by the worker, field by field."""

import pytest

from kvtransfer.causes import HandoffCause, HandoffFault
from tandem.engine.api import Proposals, TokenOut
from tandem.errors import ErrorCode, HandoffError, InputError, KvExhausted, error_from_code
from tandem.request import SamplingParams, TokenLogprob
from tandem.v1 import worker_pb2
from worker.wire import error_frame, parse_error, parse_sampling, parse_work, sampling_frame, token_frame


def work(**sampling: object) -> worker_pb2.Work:
    fields = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 4} | sampling
    return worker_pb2.Work(request_id="r", prompt=[1, 2, 3], sampling=worker_pb2.ResolvedSampling(**fields))  # type: ignore[arg-type]


def test_a_request_carries_prompt_salt_and_sampling_through() -> None:
    wire = work(top_k=5, seed=2**64 - 1, logprobs=2, stop_token_ids=[9])
    wire.cache_salt = b"tenant"
    request = parse_work(wire, engine_id="1:r", model_fingerprint="m", export_from_block=1)
    assert request.prompt == (1, 2, 3)
    assert request.hash_key.cache_salt == b"tenant"
    assert (request.sampling.top_k, request.sampling.seed, request.sampling.logprobs) == (5, 2**64 - 1, 2)
    assert request.sampling.stop_token_ids == {9}
    assert request.export_from_block == 1


def test_penalties_and_the_answer_they_count_are_carried_through() -> None:
    wire = work(presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={7: -100, 2: 1})
    wire.answer_tokens = 2
    request = parse_work(wire, engine_id="1:r", model_fingerprint="m")
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.5)
    assert sampling.logit_bias == ((2, 1.0), (7, -100.0))
    assert request.answered_tokens == 2


def test_a_prediction_and_what_came_of_it_are_carried_through() -> None:
    wire = work()
    wire.prediction.extend([4, 5, 6])
    assert parse_work(wire, engine_id="1:r", model_fingerprint="m").prediction == (4, 5, 6)
    assert parse_work(work(), engine_id="1:r", model_fingerprint="m").prediction == ()
    frame = token_frame("r", TokenOut("1:r", 4, proposals=Proposals(proposed=5, accepted=2, from_prediction=True)))
    assert (frame.proposed_tokens, frame.accepted_tokens, frame.from_prediction) == (5, 2, True)
    assert not token_frame("r", TokenOut("1:r", 4)).proposed_tokens


def test_what_a_router_writes_a_worker_reads() -> None:
    params = SamplingParams.parse(
        seed=3, max_tokens=5, temperature=0.5, top_p=0.25, top_k=7, min_p=0.5, stop_token_ids=frozenset({9, 2}),
        logprobs=0, presence_penalty=1, frequency_penalty=-2, repetition_penalty=1.5, logit_bias={4: -100.0},
        prompt_logprobs=3,
    )  # fmt: skip
    for each in (params, SamplingParams()):
        assert parse_sampling(sampling_frame(each)) == each


def test_absent_limits_become_none_not_zero() -> None:
    request = parse_work(work(), engine_id="1:r", model_fingerprint="m")
    assert not request.sampling.changes_logits
    assert request.sampling.top_k is None
    assert request.sampling.logprobs is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 2.5),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError):
        parse_work(work(**{field: value}), engine_id="1:r", model_fingerprint="m")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="prompt"):
        parse_work(worker_pb2.Work(request_id="r"), engine_id="1:r", model_fingerprint="m")


def test_a_token_keeps_its_logprobs() -> None:
    frame = token_frame("r", TokenOut("1:r", 5, -0.25, (TokenLogprob(5, -0.25), TokenLogprob(7, -2.0)), 16))
    assert (frame.token_id, frame.cached_tokens) == (5, 16)
    assert [top.token_id for top in frame.logprobs.top] == [5, 7]


def test_errors_keep_their_code_on_the_wire() -> None:
    ended = error_frame("r", KvExhausted("no room", field="prompt"))
    error = error_from_code(ended.error.code, ended.error.message, ended.error.field)
    assert (error.code, error.field) == (ErrorCode.KV_EXHAUSTED, "prompt")
    assert error.wire.retryable


@pytest.mark.parametrize("cause", list(HandoffCause))
def test_the_cause_of_a_failed_handoff_travels_as_data(cause: HandoffCause) -> None:
    found = parse_error(error_frame("r", HandoffFault(cause, "why")).error)
    assert isinstance(found, HandoffFault)
    assert (found.cause, found.message, found.code) == (cause, "why", ErrorCode.HANDOFF_FAILED)


def test_other_errors_and_strange_causes_stay_typed() -> None:
    assert isinstance(parse_error(error_frame("r", KvExhausted("no room")).error), KvExhausted)
    newer = parse_error(worker_pb2.WorkerError(code="handoff_failed", message="m", cause="solar_flare"))
    assert isinstance(newer, HandoffFault)
    assert newer.cause is HandoffCause.PROTOCOL
    older = parse_error(worker_pb2.WorkerError(code="handoff_failed", message="m"))
    assert isinstance(older, HandoffError)
    assert not isinstance(older, HandoffFault)
