"""A step's tokens and prompt scores, put into the frames of the routers that wait for them."""

from __future__ import annotations

from tandem.engine.api import StepResult
from worker.requests import RequestBook
from worker.wire import scores_frame, token_frame


def report_step(result: StepResult, requests: RequestBook) -> None:
    for scores in result.prompt_scores:
        if target := requests.frame_of(scores.request_id):
            frame, request_id = target
            frame.prompt_scores.append(scores_frame(request_id, scores))
    for token in result.tokens:
        if target := requests.frame_of(token.request_id):
            frame, request_id = target
            frame.tokens.append(token_frame(request_id, token))
