"""A step's tokens, put into the frames of the routers that wait for them."""

from __future__ import annotations

from tandem.engine.api import StepResult
from worker.requests import RequestBook
from worker.wire import token_frame


def report_step(result: StepResult, requests: RequestBook) -> None:
    for token in result.tokens:
        if target := requests.frame_of(token.request_id):
            frame, request_id = target
            frame.tokens.append(token_frame(request_id, token))
