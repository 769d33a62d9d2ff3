"""A step's tokens and prompt scores, put into the frames of the routers that wait for them; with a first token, when
its prompt was computed."""

from __future__ import annotations

from tandem.engine.api import StepResult
from worker.requests import RequestBook
from worker.wire import scores_frame, token_frame


def report_step(result: StepResult, requests: RequestBook, began_s: float, ended_s: float) -> None:
    """`began_s`, `ended_s`: of the step, on the clock of the frames."""
    for engine_id in result.began:
        requests.computing(engine_id, began_s)
    for scores in result.prompt_scores:
        if target := requests.frame_of(scores.request_id):
            frame, request_id = target
            frame.prompt_scores.append(scores_frame(request_id, scores))
    for token in result.tokens:
        if target := requests.frame_of(token.request_id):
            frame, request_id = target
            wire = token_frame(request_id, token)
            if token.cached_tokens is not None and (computing_at_s := requests.computing_since_s(token.request_id)):
                wire.computing_at_s, wire.sampled_at_s = computing_at_s, ended_s
            frame.tokens.append(wire)
