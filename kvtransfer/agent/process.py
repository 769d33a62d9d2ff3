"""The process of a transfer agent, as its rank sees it: only its end proves that it writes no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Protocol


class AgentProcess(Protocol):
    async def ended(self, within_s: float) -> bool:
        """Whether the process ends within this time. Its memory is then no longer mapped."""
        ...

    def kill(self) -> None:
        """Sends SIGKILL. The process may end later."""
        ...

    def close(self) -> None:
        """Releases the handle."""
        ...


class PidfdProcess:
    """A process that need not be a child. The descriptor never means another process that got the same id."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if it has ended, and OSError if the kernel or its container has no pidfd."""
        self._fd = os.pidfd_open(pid)

    async def ended(self, within_s: float) -> bool:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, end.set)
        try:
            async with asyncio.timeout(within_s):
                await end.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._fd)
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._fd)
