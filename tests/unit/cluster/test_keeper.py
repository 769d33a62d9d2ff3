"""The keeper's socket: what a controller starts there outlives it, and only the latest controller is heard."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.keeper.keeper import Keeper
from cluster.keeper.members import MemberStart, ProcessSpec, is_running
from cluster.keeper.remote import KeeperServer, RemoteKeeper
from tandem.errors import TandemError, UnavailableError

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
SLOW_TO_STOP = (
    sys.executable,
    "-c",
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(0))); "
    "print('up', flush=True); time.sleep(600)",
)


class Kept:
    def __init__(self, folder: Path) -> None:
        self.keeper = Keeper(folder / "logs")
        self.reports: list[tuple[str, str]] = []
        self.server = KeeperServer(self.keeper, lambda kind, text: self.reports.append((kind, text)))
        self.path = folder / "k.sock"

    async def connect(self) -> RemoteKeeper:
        return await RemoteKeeper.connect(self.path)


@pytest.fixture
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    running = Kept(tmp_path_factory.mktemp("k"))
    await running.server.serve(running.path)
    yield running
    await running.server.close()
    await running.keeper.close()
    assert await running.keeper.members() == {}


def start_of(folder: Path, name: str = "run", argv: tuple[str, ...] = SLEEP) -> MemberStart:
    process = ProcessSpec(name="rank", argv=argv)
    return MemberStart(run_dir=str(folder / name), files={"secret": "x"}, processes=(process,))


async def test_the_next_controller_finds_what_runs_and_sees_it_end(kept: Kept, tmp_path: Path) -> None:
    start = start_of(tmp_path)
    first = await kept.connect()
    await first.start("w.0", start, "cuda:3")
    await first.keep("what the next one must know")
    await first.close()
    second = await kept.connect()
    found = (await second.members())["w.0"]
    assert is_running(found, start)
    assert not is_running(found, start_of(tmp_path, "another"))
    assert (found.device, await second.kept()) == ("cuda:3", "what the next one must know")
    ending = asyncio.create_task(second.wait_end("w.0"))
    await asyncio.sleep(0.05)
    (process,) = found.processes
    os.kill(process.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in (await ending).reason
    ended = (await second.members())["w.0"]
    assert ended.end is not None
    assert not is_running(ended, start)
    await second.stop("w.0")
    assert await second.members() == {}
    await second.close()


async def test_a_later_controller_takes_over_and_the_earlier_one_is_refused(kept: Kept, tmp_path: Path) -> None:
    """As one that was frozen, and wakes up when another has its place."""
    first = await kept.connect()
    await first.keep("first")
    waiting = asyncio.create_task(first.wait_end("w.0"))
    second = await kept.connect()
    assert await second.kept() == "first"
    async with asyncio.timeout(60):
        assert "another controller took over" in await first.wait_lost()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(UnavailableError, match="another controller took over"):
        await first.start("w.0", start_of(tmp_path))
    await second.keep("second")
    assert await second.members() == {}
    assert await kept.keeper.kept() == "second"
    await first.close()
    await second.close()


async def test_a_stop_runs_to_its_end_although_the_controller_died(kept: Kept, tmp_path: Path) -> None:
    start = start_of(tmp_path, argv=SLOW_TO_STOP)
    first = await kept.connect()
    await first.start("w.0", start)
    log = tmp_path / "none"
    async with asyncio.timeout(60):
        while not log.exists():
            log = next((kept.path.parent / "logs").glob("w.0.*.log"))
            if "up" not in log.read_text():
                log = tmp_path / "none"
            await asyncio.sleep(0.01)
    stopping = asyncio.create_task(first.stop("w.0"))
    async with asyncio.timeout(60):
        while await kept.keeper.members():  # until it is being stopped
            await asyncio.sleep(0.01)
    stopping.cancel()
    await first.close()
    second = await kept.connect()
    assert await second.members() == {}  # what is being stopped is not taken over
    await second.start("w.0", start)  # waits for the stop
    assert is_running((await second.members())["w.0"], start)
    await second.close()


async def test_a_call_that_fails_says_why_and_later_calls_work(kept: Kept) -> None:
    remote = await kept.connect()
    with pytest.raises(TandemError, match="unknown"):
        await remote._call("unknown")
    await remote.report("progress", "hello")
    assert kept.reports == [("progress", "hello")]
    await remote.close()


async def test_what_cannot_be_read_ends_the_connection_and_nothing_else(kept: Kept) -> None:
    for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03{]}", b"\x00\x00\x00\x02[]", b"\x00"):
        reader, writer = await asyncio.open_unix_connection(kept.path)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
    remote = await kept.connect()
    assert await remote.members() == {}
    await remote.close()
