"""The embedded server: private, restarted in place, gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from cluster.backends import embedded_redis
from cluster.keeper.supervisor import Supervisor
from cluster.spec.redis_probe import check_redis
from tandem.errors import ConfigError


async def answers(url: str) -> bool:
    try:
        await asyncio.to_thread(check_redis, url)
    except ConfigError:
        return False
    return True


async def test_killed_it_comes_back_in_place(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("r")
    start, url = embedded_redis.member(folder / "run")
    supervisor = Supervisor("redis", folder / "logs")
    await supervisor.start(start)
    async with asyncio.timeout(60):
        while not await answers(url):
            await asyncio.sleep(0.02)
        (before,) = supervisor.processes()
        os.kill(before.pid, signal.SIGKILL)
        while not (found := supervisor.processes()) or found[0].pid == before.pid or not await answers(url):
            await asyncio.sleep(0.02)
    await supervisor.stop()
    assert not psutil.pid_exists(found[0].pid)
    assert not (folder / "run").exists()
