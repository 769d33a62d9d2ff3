"""`tandem replay`: feed a router's recording to the same code again, and show the first difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.cli.console import console
from router.requests.recording.replay import Difference, Replay, ReplayReport, Step
from tandem.errors import InputError
from tandem.text.words import plural


def run_replay(file: Path, request: str | None, steps: bool) -> int:
    """0: every action and placement is the same. 1: one differs, which is shown."""
    screen = console()
    seen: set[str] = set()

    def show(step: Step) -> None:
        seen.add(step.request_id)
        if request in (None, step.request_id):
            screen.print(
                f"{step.at_s:.6f}  {step.request_id}  {step.event} → {step.state}", markup=False, soft_wrap=True
            )
            for action in step.actions:
                screen.print(f"    {_line(action)}", markup=False, soft_wrap=True)

    try:
        with file.open("rb") as source:
            report = Replay(show if steps or request else _ignore).run(source)
    except OSError as error:
        raise InputError(f"FILE: cannot read {file}: {error.strerror}", field="FILE") from None
    if request is not None and request not in seen:
        raise InputError(
            f"--request: expected the id of a request in this recording, got {request!r}; without --request, --steps "
            "shows all of them",
            field="--request",
        )
    screen.print(_summary(report), markup=False, soft_wrap=True)
    for reason, count in report.skipped.items():
        screen.print(f"not replayed: {plural(count, 'line')} ({reason})", markup=False, soft_wrap=True)
    if report.first is None:
        return 0
    _show_difference(report.first)
    return 1


def _summary(report: ReplayReport) -> str:
    differ = "all the same" if not report.differences else f"{report.differences} differ"
    events, tokens = plural(report.events, "event"), plural(report.tokens, "token")
    placements = plural(report.placements, "placement")
    return f"replayed {plural(report.runs, 'request')}: {events}, {tokens} and {placements}; {differ}"


def _show_difference(difference: Difference) -> None:
    screen = console()
    where = f"line {difference.line}, request {difference.request_id}, {difference.what}"
    screen.print(f"the first difference: {where}", markup=False, soft_wrap=True)
    for name, actions in (("recorded", difference.recorded), ("replayed", difference.replayed)):
        screen.print(f"  {name}:", markup=False)
        for action in actions or ["nothing"]:
            screen.print(f"    {_line(action)}", markup=False, soft_wrap=True)


def _line(action: Any) -> str:
    if not isinstance(action, dict):
        return str(action)
    fields = (f"{name}={json.dumps(value)}" for name, value in action.items() if name != "type")
    return " ".join([str(action["type"]), *fields])


def _ignore(step: Step) -> None:
    pass
