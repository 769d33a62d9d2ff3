"""Many transfer agents in one process, as peers for one that is measured: `python -m ... --socket PATH PATH ...`."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

from kvtransfer.agent.agent import Agent
from kvtransfer.agent.env import AGENT_ENV
from kvtransfer.transports.factory import Transports
from tandem.clock import SystemClock


def start_host(sockets: list[Path]) -> subprocess.Popen[bytes]:
    """A process with an agent at each socket, as `host` of their workers."""
    for socket in sockets:
        socket.parent.mkdir(mode=0o700)
    command = [sys.executable, "-m", "kvtransfer.testing.many_agents", "--socket", *map(str, sockets)]
    return subprocess.Popen(command, env=os.environ | AGENT_ENV | {"PYTHONPATH": os.pathsep.join(sys.path)})


async def run(paths: list[Path]) -> None:
    await asyncio.gather(*(Agent(path, Transports(), SystemClock()).run() for path in paths))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, nargs="+", required=True)
    asyncio.run(run(parser.parse_args().socket))
