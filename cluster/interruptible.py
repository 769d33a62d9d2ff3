"""Processes that Ctrl-C and SIGTERM end cleanly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended, as of a shell


def run_interruptible(main: Coroutine[Any, Any, int]) -> int:
    """Runs `main` and returns its exit code. The first SIGINT or SIGTERM cancels it, for a clean end with code 0; the
    second ends this process immediately, and its children die with it."""

    async def run() -> int:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        interrupted = False

        def stop() -> None:
            nonlocal interrupted
            interrupted = True
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)
                signal.signal(signum, signal.SIG_DFL)
            task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop)
        try:
            return await task
        except asyncio.CancelledError:
            return 0 if interrupted else 1

    return asyncio.run(run())
