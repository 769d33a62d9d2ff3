"""Log lines carry the names of the request whose task they come from, and of no other."""

import asyncio
import json
import logging

from tandem.telemetry.log_context import log_names, name_logs
from tandem.telemetry.logs import JsonFormatter, TextFormatter


def line(**extra: str) -> dict[str, object]:
    record = logging.makeLogRecord({"msg": "said", "levelname": "INFO", "name": "router", **extra})
    shown: dict[str, object] = json.loads(JsonFormatter("router-0").format(record))
    return shown


async def test_each_task_has_its_own_names() -> None:
    async def serve(number: int) -> dict[str, object]:
        name_logs({"request": f"r{number}", "trace_id": f"t{number}"})
        await asyncio.sleep(0.001 * (3 - number))
        return line()

    found = await asyncio.gather(*(serve(number) for number in range(3)))
    assert [(each["request"], each["trace_id"]) for each in found] == [("r0", "t0"), ("r1", "t1"), ("r2", "t2")]
    assert not log_names()


async def test_what_a_request_has_set_off_does_not_go_by_its_name() -> None:
    found: list[dict[str, object]] = []

    async def serve() -> None:
        name_logs({"request": "r"})
        loop = asyncio.get_running_loop()
        loop.call_later(0, lambda: found.append(line()))
        await asyncio.create_task(other())

    async def other() -> None:
        await asyncio.sleep(0.01)
        found.append(line())

    await asyncio.create_task(serve())
    assert [each.get("request") for each in found] == [None, None]


async def test_a_line_about_another_request_is_about_that_one_alone() -> None:
    name_logs({"request": "mine", "trace_id": "mine"})
    shown = line(request="other")
    assert shown["request"] == "other"
    assert "trace_id" not in shown


def test_outside_of_an_event_loop_there_are_none() -> None:
    assert not log_names()
    record = logging.makeLogRecord({"msg": "said %d", "args": (7,), "levelname": "WARNING", "worker": "d0"})
    assert TextFormatter("p").format(record).endswith("warning p: said 7 worker=d0")
