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
from tandem.errors import ConfigError

INTERVAL_S = 1.0
ONCE_ROWS = 60


def run_top(
    once: bool, interval_s: float | None, address: str | None, cluster: str | None, tls: Path | None = None
) -> int:
    """Raises ConfigError, or UnavailableError if no controller answers."""
    if once and interval_s is not None:
        raise ConfigError("--interval: expected none with --once, which shows one frame", field="--interval")
    target = find_admin(address, cluster, tls)
    if once or not sys.stdout.isatty():
        return asyncio.run(_print_once(target))
    return asyncio.run(_run(target, interval_s or INTERVAL_S))


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
