"""A keeper's unix socket, which one controller at a time may use. No gRPC: the keeper must stay small.

A frame is four bytes with its length, then JSON. A call is `{"id", "call", "arguments"}`; its answer has the same id
and `result` or `error`. Calls run at the same time, and run to their end even if the controller dies before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cluster.devices import CPU
from cluster.keeper.keeper import KeeperCalls
from cluster.keeper.members import MemberEnd, MemberStart, RunningMember
from tandem.errors import TandemError, UnavailableError

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20

OnReport = Callable[[str, str], None]


class KeeperServer:
    """`on_report` gets what the controller has to say to `tandem up`: a kind and a text.

    A new connection takes over: the earlier one is closed, and none of its calls begins any more. So two controllers
    never act at once, even if one of them was frozen for a while.
    """

    def __init__(self, keeper: KeeperCalls, on_report: OnReport) -> None:
        self._keeper = keeper
        self._on_report = on_report
        self._server: asyncio.Server | None = None
        self._holder: asyncio.StreamWriter | None = None
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "start": self._start,
            "wait_end": self._wait_end,
            "members": self._list,
            "stop": keeper.stop,
            "keep": keeper.keep,
            "kept": keeper.kept,
            "report": self._report,
        }

    async def serve(self, path: Path) -> None:
        """`path` must be in a private folder: who can connect may start any program."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        if self._holder is not None:
            self._holder.close()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._holder is not None:
            self._holder.close()
        self._holder = writer
        answers: set[asyncio.Task[None]] = set()
        waits: set[asyncio.Task[None]] = set()
        try:
            while (frame := await _read(reader)) is not None and self._holder is writer:
                task = asyncio.create_task(self._answer(frame, writer))
                group = waits if frame.get("call") == "wait_end" else answers
                group.add(task)
                task.add_done_callback(group.discard)
        finally:
            for wait in waits:
                wait.cancel()
            if answers:
                await asyncio.wait(answers)
            writer.close()

    async def _answer(self, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {"id": frame["id"]}
        try:
            answer["result"] = await self._calls[frame["call"]](**frame["arguments"])
        except Exception as error:
            log.exception("the controller's call %s failed", frame.get("call"))
            answer["error"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(ConnectionError):  # the controller is gone
            await _write(writer, answer)

    async def _start(self, name: str, start: dict[str, Any], device: str) -> None:
        await self._keeper.start(name, MemberStart.model_validate(start), device)

    async def _wait_end(self, name: str) -> dict[str, Any]:
        return (await self._keeper.wait_end(name)).model_dump()

    async def _list(self) -> dict[str, dict[str, Any]]:
        return {name: member.model_dump() for name, member in (await self._keeper.members()).items()}

    async def _report(self, kind: str, text: str) -> None:
        self._on_report(kind, text)


class RemoteKeeper:
    """The controller's side. After `wait_lost`, calls raise UnavailableError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lost = asyncio.Event()
        self._writer = writer
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read_answers(reader))

    @classmethod
    async def connect(cls, path: Path) -> RemoteKeeper:
        return cls(*await asyncio.open_unix_connection(path))

    async def start(self, name: str, start: MemberStart, device: str = CPU) -> None:
        await self._call("start", name=name, start=start.model_dump(), device=device)

    async def wait_end(self, name: str) -> MemberEnd:
        return MemberEnd.model_validate(await self._call("wait_end", name=name))

    async def members(self) -> dict[str, RunningMember]:
        found = await self._call("members")
        return {name: RunningMember.model_validate(member) for name, member in found.items()}

    async def stop(self, name: str) -> None:
        await self._call("stop", name=name)

    async def keep(self, record: str) -> None:
        await self._call("keep", record=record)

    async def kept(self) -> str:
        return str(await self._call("kept"))

    async def report(self, kind: str, text: str) -> None:
        await self._call("report", kind=kind, text=text)

    async def wait_lost(self) -> str:
        await self._lost.wait()
        return _lost().message

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    async def _call(self, call: str, **arguments: Any) -> Any:
        if self._lost.is_set():
            raise _lost()
        self._next_id += 1
        number = self._next_id
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await _write(self._writer, {"id": number, "call": call, "arguments": arguments})
            return await answer
        except ConnectionError:
            raise _lost() from None
        finally:
            self._answers.pop(number, None)

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await _read(reader)) is not None:
                if (answer := self._answers.get(frame["id"])) is None or answer.done():
                    continue
                if "error" in frame:
                    answer.set_exception(TandemError(frame["error"]))
                else:
                    answer.set_result(frame.get("result"))
        finally:
            self._lost.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(_lost())


def _lost() -> UnavailableError:
    return UnavailableError("the keeper of this cluster has ended, or another controller took over")


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """None at the end of the connection, or if it cannot be read on."""
    try:
        size = int.from_bytes(await reader.readexactly(4))
        if size > MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {size} bytes")
        frame = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return None
    return frame if isinstance(frame, dict) and "id" in frame else None


async def _write(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    data = json.dumps(frame).encode()
    writer.write(len(data).to_bytes(4) + data)
    await writer.drain()
