"""`tandem chat` at a terminal, against a router: questions, Ctrl-C, and what it remembers."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from router.testing.stub_worker import until
from tests.unit.router.conftest import Cluster

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A process whose terminal is ours. `shown`: all that it printed so far."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        env = os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "cluster", "chat", *arguments],  # so that Ctrl-C is a signal
            stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        )  # fmt: skip
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    async def shows(self, text: str, times: int = 1) -> None:
        await until(lambda: self.shown.count(text) >= times)

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self) -> None:
        try:
            self.shown += os.read(self._ours, 65536).decode(errors="replace")
        except OSError:  # the process has ended
            asyncio.get_running_loop().remove_reader(self._ours)


@contextmanager
def chatting(cluster: Cluster, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal("--address", f"127.0.0.1:{cluster.app.grpc_port}", *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


def prompts(cluster: Cluster) -> list[str]:
    """The chats that the workers computed, as text."""
    return [cluster.tokenizer.decode(work.prompt) for work in cluster.decode.works.values()]


class TestAtATerminal:
    async def test_ctrl_c_ends_the_answer_and_the_conversation_goes_on(self, cluster: Cluster) -> None:
        cluster.says(" word" * 400)
        for worker in (cluster.prefill, cluster.decode):
            worker.behaviour.token_delay_s = 0.02
        with chatting(cluster) as terminal:
            await terminal.shows("you> ")
            terminal.type(b"first question\n")
            await terminal.shows(" word word")
            terminal.type(CTRL_C)
            await terminal.shows("The answer was ended.")
            await cluster.settled()
            assert cluster.ends("cancelled") == 1
            for worker in (cluster.prefill, cluster.decode):
                worker.behaviour.token_delay_s = 0.0
            cluster.says(" done")
            terminal.type(b"second question\n")
            await terminal.shows(" done")
            assert "first question" in prompts(cluster)[-1]
            assert "word word" in prompts(cluster)[-1], "the part that came stays in the conversation"
            terminal.type(b"/clear\n")
            await terminal.shows("you> ", times=4)
            terminal.type(b"third question\n")
            await terminal.shows(" done", times=2)
            assert "question" in prompts(cluster)[-1]
            assert "first question" not in prompts(cluster)[-1]
            await terminal.shows("you> ", times=5)
            terminal.type(b"/bye\n")
            assert await terminal.ended() == 0

    async def test_ctrl_d_and_ctrl_c_instead_of_a_question_end_it(self, cluster: Cluster) -> None:
        for key in (CTRL_D, CTRL_C):
            with chatting(cluster) as terminal:
                await terminal.shows("you> ")
                terminal.type(key)
                assert await terminal.ended() == 0, terminal.shown
                assert "Traceback" not in terminal.shown
