"""Many transfer agents in one process, as peers for one that is measured: `python -m ... --socket PATH PATH ...`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from kvtransfer.agent.agent import Agent
from kvtransfer.transports.factory import Transports
from tandem.clock import SystemClock


async def run(paths: list[Path]) -> None:
    await asyncio.gather(*(Agent(path, Transports(), SystemClock()).run() for path in paths))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, nargs="+", required=True)
    asyncio.run(run(parser.parse_args().socket))
