"""`tandem top`: a live view of the cluster in the terminal; without a terminal, one frame."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cluster.cli.admin_client import Admin, find_admin
from cluster.cli.console import console
from cluster.cli.top.app import TopApp
from cluster.cli.top.overview import overview
from cluster.cli.top.source import FrameSource

ONCE_ROWS = 60


def run_top(once: bool, interval_s: float, address: str | None, cluster: str | None, tls: Path | None = None) -> int:
    """Raises UnavailableError if no controller answers."""
    target = find_admin(address, cluster, tls)
    if once or not sys.stdout.isatty():
        return asyncio.run(_print_once(target))
    return asyncio.run(_run(target, interval_s))


async def _print_once(admin: Admin) -> int:
    async with FrameSource(admin) as source:
        frame = await source.frame()
    screen = console()
    screen.print(overview(frame, screen.width, ONCE_ROWS))
    return 0


async def _run(admin: Admin, interval_s: float) -> int:
    async with FrameSource(admin) as source:
        app = TopApp(source, await source.frame(), interval_s)
        await app.run_async()
    return app.return_code or 0
