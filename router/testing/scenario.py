"""Scripts of what happens to one request, and of what its run does about it: tests/data/scenarios.

    request max_tokens=3 migrations=1          what was asked for; stop=7,8 names stop tokens, deadline=9.5 a deadline
    1.0 Started decode=d0 prefill=p0           when, which event, its fields
        Reserve worker=d0 wire_id=r.1 ...      an action it leads to
        = queued                               the state it leaves

A worker `d0` has epoch 1, `d0/2` epoch 2. Errors are codes: `error=worker_lost`, `error=handoff_failed:deadline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.request_terms import RequestTerms
from router.requests.events import Event
from router.requests.output import TextPiece
from router.requests.recording.recorder import render
from router.requests.recording.replay import RecordedRequest, event_from
from router.requests.state_machine import RequestRun
from tandem.request import Lifecycle, RequestState, SamplingParams

_WORKERS = ("worker", "decode", "prefill", "target", "source", "sender")
_NUMBERS = ("max_tokens", "migrations", "cached_tokens", "moved_bytes", "moved_blocks", "credited_tokens")
_SECONDS = ("age_s", "joined_after_s")
_ERRORS = ("error", "cause")


class TextlessAssembler:
    """Token 99 completes a stop string."""

    stopped = False
    stop_string: str | None = None

    def push(self, token: Any) -> TextPiece:
        self.stopped = self.stopped or token.token_id == 99
        return TextPiece("", (token,))

    def flush(self) -> TextPiece | None:
        return None


class SeenLifecycle(Lifecycle):
    """Keeps the edges that were taken."""

    __slots__ = ("edges",)

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[tuple[RequestState, RequestState]] = []

    def _to(self, target: RequestState) -> None:
        before = self.state
        super()._to(target)
        self.edges.append((before, target))

    def _end(self, target: RequestState) -> None:
        before = self.state
        super()._end(target)
        self.edges.append((before, target))


class Scenario:
    """Runs a script. `edges`: those of the state machine that it took."""

    def __init__(self) -> None:
        self.edges: list[tuple[RequestState, RequestState]] = []

    def played(self, script: str) -> str:
        """The script with the actions and states that its events really lead to."""
        return "\n".join(self._played(script.splitlines())) + "\n"

    def _played(self, lines: list[str]) -> Iterator[str]:
        run: RequestRun | None = None
        for line in lines:
            words = line.split()
            if not words or line.startswith("#"):
                yield line
            elif words[0] == "request":
                run = _new_run(_fields(words[1:]))
                yield line
            elif not line.startswith(" ") and run is not None:
                yield line
                yield from self._step(run, float(words[0]), _event(words[1], _fields(words[2:])))

    def _step(self, run: RequestRun, now_s: float, event: Event) -> Iterator[str]:
        run.lifecycle.edges.clear()  # type: ignore[attr-defined]  # a SeenLifecycle
        actions = run.on(event, now_s)
        self.edges += run.lifecycle.edges  # type: ignore[attr-defined]
        while actions:
            yield "    " + _shown(render(actions.popleft(), frozenset(), text=True))
        yield f"    = {run.state}"


def _new_run(fields: dict[str, str]) -> RequestRun:
    stops = frozenset(int(each) for each in fields.get("stop", "").split(",") if each)
    scores = int(fields["prompt_logprobs"]) if "prompt_logprobs" in fields else None
    sampling = SamplingParams(max_tokens=int(fields["max_tokens"]), stop_token_ids=stops, prompt_logprobs=scores)
    request = RecordedRequest("r", "m", (1, 2, 3, 4), 4, sampling, block_tokens=2)
    deadline_s = float(fields["deadline"]) if "deadline" in fields else None
    run = RequestRun(
        request, TextlessAssembler(), RequestTerms("", deadline_s=deadline_s), 0.0, int(fields["migrations"])
    )
    run.lifecycle = SeenLifecycle()
    return run


def _fields(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _event(name: str, fields: dict[str, str]) -> Event:
    event = event_from({"type": name} | {key: _value(key, text) for key, text in fields.items()})
    if event is None:
        raise ValueError(f"expected an event, got {name}")
    return event


def _value(name: str, text: str) -> Any:
    if name in _WORKERS:
        worker_id, _, epoch = text.partition("/")
        return [worker_id, int(epoch or 1)]
    if name in _NUMBERS:
        return int(text)
    if name in _SECONDS:
        return float(text)
    if name in _ERRORS:
        code, _, cause = text.partition(":")
        return {"code": code, "message": code} | ({"cause": cause} if cause else {})
    if name == "token":
        return {"token_id": int(text), "cached_tokens": 0}
    if name in ("tokens", "token_ids"):
        return [int(each) for each in text.split(",")]
    return text == "yes" if name == "held" else text


def _shown(action: dict[str, Any]) -> str:
    return " ".join([action.pop("type"), *(f"{name}={_text(value)}" for name, value in action.items() if _said(value))])


def _said(value: Any) -> bool:
    return value not in (None, "", [], {})


def _text(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str):
        return value[0] if value[1] == 1 else f"{value[0]}/{value[1]}"
    if isinstance(value, list | tuple):
        return ",".join(_text(each) for each in value)
    if isinstance(value, dict):
        if "token_id" in value:
            return str(value["token_id"])
        if "code" in value:
            return f"{value['code']}({value['message']})".replace(" ", "_")
        return "{" + ",".join(f"{key}:{_text(each)}" for key, each in value.items() if _said(each)) + "}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
