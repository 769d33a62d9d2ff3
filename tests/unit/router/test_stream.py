"""What a request's one reader gets, and what is left when it was read."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.observe.trace import Attempt, Trace
from router.probes.canary import CANARY_ID_PREFIX
from router.requests.answers import Answers, SubmittedRequest
from router.requests.output import ResponseStream, TextPiece
from router.requests.state_machine import RequestRun
from router.testing.stub_worker import until
from router.workers import link as worker_client
from tandem.errors import RequestCancelled
from tandem.v1 import inference_pb2
from tests.unit.router.conftest import MODEL, Cluster


async def test_an_error_is_raised_once_and_goes_with_its_reader() -> None:
    """Its traceback has the reader's frames, and they all that the request held: neither may wait for the collector."""
    stream = ResponseStream("r", on_cancel=lambda: None)
    trace = Trace("r", "m", 4, received_s=0.0)
    trace.attempts.append(Attempt("r.1", "", "decode-0", 0.0, 0.0))

    def fail() -> weakref.ref[RequestCancelled]:
        error = RequestCancelled("gone")
        trace.failed(error, 1.0)
        stream.fail(error)
        return weakref.ref(error)

    gc.disable()
    try:
        error = fail()
        assert stream.has_failed
        with suppress(RequestCancelled):
            await stream.next()
        assert error() is None
    finally:
        gc.enable()
    assert not stream.has_failed
    assert await stream.next() == []
    failure = trace.attempts[0].failure
    assert failure is not None
    assert failure.message == "gone"


def test_what_other_answers_gave_comes_before_an_error() -> None:
    streams = [ResponseStream(f"r-{number}", on_cancel=lambda: None) for number in range(2)]
    request = SimpleNamespace(prompt_tokens=1)
    submitted = [SubmittedRequest(cast(Any, request), cast(Any, None), stream) for stream in streams]
    answers = Answers("r", submitted, choices=2)
    streams[0].put(TextPiece("said", ()))
    streams[1].fail(RequestCancelled("gone"))
    assert [(each.index, each.pieces[0].text) for each in answers.take()] == [(0, "said")]
    assert answers.has_failed
    streams[0].put(TextPiece("more", ()))
    with pytest.raises(RequestCancelled, match="gone"):
        answers.take()
    assert answers.failed == 1


def held_for_clients() -> list[str]:
    """Requests of canaries are few, and may wait."""
    objects = gc.get_objects()
    runs = [each.request.request_id for each in objects if type(each) is RequestRun]
    streams = [each.request_id for each in objects if type(each) is ResponseStream]
    return [each for each in runs + streams if not each.startswith(CANARY_ID_PREFIX)]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_answered_waits_for_no_collector(
    cluster: Cluster, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of such objects a second made it stop the router for tens of milliseconds, again and again. A report of
    the handoff that never comes does not keep them either."""
    monkeypatch.setattr(worker_client, "LATE_REPORT_S", 0.05)
    cluster.prefill.behaviour.hold_sent_reports = True
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": stream}
    sampling = inference_pb2.SamplingParams(max_tokens=3)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await cluster.http.post("/v1/chat/completions", json=body)).status_code == 200
            call = cluster.inference.Generate(inference_pb2.GenerateRequest(prompt="hello", sampling=sampling))
            assert [each async for each in call]
        await until(lambda: not held_for_clients())
    finally:
        gc.enable()
