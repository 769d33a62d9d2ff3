"""What a request's one reader gets, and what is left when it was read."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

from router.output import ResponseStream
from router.trace import Attempt, Trace
from tandem.errors import RequestCancelled


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
