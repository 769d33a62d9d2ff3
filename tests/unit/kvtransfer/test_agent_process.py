"""An agent whose connection ended may still write: only the end of its process frees its blocks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtransfer.agent.client import AgentClient
from kvtransfer.agent.process import PidfdProcess
from kvtransfer.control import Lead
from tandem.errors import WorkerLost
from worker.inbox import AgentStuck, Inbox
from worker.leader import Leader

CLOSES_AND_STOPS = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
peer, _ = listener.accept()
peer.recv(100)
peer.close()
if sys.argv[2] == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
"""


class Agent:
    """A process that takes a connection, closes it, and then ends or stops without an end."""

    def __init__(self, folder: Path, way: str) -> None:
        self.path = folder / "agent.sock"
        self.process = subprocess.Popen([sys.executable, "-c", CLOSES_AND_STOPS, str(self.path), way])


@pytest.fixture
def stopping(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, "stop")
    yield agent
    agent.process.kill()
    agent.process.wait()


class Unending:
    """A process that a kill does not end, as one in an uninterruptible wait."""

    def __init__(self, pid: int) -> None:
        self.kills = 0
        self.end = asyncio.Event()

    async def ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self.end.wait()
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        self.kills += 1

    def close(self) -> None:
        """Holds nothing."""


async def eventually(events: list[str], event: str) -> None:
    async with asyncio.timeout(20):
        while event not in events:
            await asyncio.sleep(0.01)


async def test_an_agent_that_only_closed_its_connection_is_killed_before_it_counts_as_lost(stopping: Agent) -> None:
    events, codes = list[str](), list[int | None]()
    client = AgentClient(asyncio.get_running_loop(), grace_s=0.5)
    began_s = time.monotonic()

    def on_lost() -> None:
        codes.append(stopping.process.poll())
        events.append("lost")

    client.connect(stopping.path, Lead(), None, lambda message: None, on_lost)
    await eventually(events, "lost")
    assert codes == [-signal.SIGKILL]
    assert time.monotonic() - began_s >= 0.5
    client.close()


async def test_an_agent_that_ends_counts_as_lost_at_once(tmp_path: Path) -> None:
    agent, events = Agent(tmp_path, "end"), list[str]()
    client = AgentClient(asyncio.get_running_loop(), grace_s=60.0)
    client.connect(agent.path, Lead(), None, lambda message: None, lambda: events.append("lost"))
    await eventually(events, "lost")
    assert agent.process.wait(60) == 0
    client.close()


async def test_an_agent_that_does_not_end_is_reported_and_not_lost_until_it_does(stopping: Agent) -> None:
    events: list[str] = []
    process = Unending(0)
    client = AgentClient(asyncio.get_running_loop(), lambda pid: process, grace_s=0.05, stuck_s=0.05)
    client.connect(
        stopping.path, Lead(), None, lambda message: None, lambda: events.append("lost"),
        on_stuck=lambda pid: events.append(f"stuck {pid == stopping.process.pid}"),
    )  # fmt: skip
    await eventually(events, "stuck True")
    await asyncio.sleep(0.2)
    assert events == ["stuck True"]
    assert process.kills == 1
    assert client.pid == stopping.process.pid
    process.end.set()
    await eventually(events, "lost")
    assert client.pid is None
    client.close()


async def test_a_process_need_not_be_a_child_and_its_end_is_seen(stopping: Agent) -> None:
    process = PidfdProcess(stopping.process.pid)
    assert not await process.ended(0.05)
    process.kill()
    assert await process.ended(60)
    assert await process.ended(0.05)  # though no call waited for it
    process.kill()
    process.close()
    stopping.process.wait()
    with pytest.raises(ProcessLookupError):
        PidfdProcess(stopping.process.pid)


def test_a_worker_with_an_agent_that_does_not_end_ends_itself() -> None:
    inbox = Inbox()
    inbox.put(AgentStuck(1, 4711))
    idle = SimpleNamespace(has_work=False, collect=lambda: None, is_collecting=False, report_layers=lambda report: None)
    parts = [idle] * 9
    parts[6] = inbox  # type: ignore[call-overload]
    with pytest.raises(WorkerLost, match=r"agent of rank 1 \(pid 4711\) was killed and does not end"):
        Leader(*parts).run()  # type: ignore[arg-type]
