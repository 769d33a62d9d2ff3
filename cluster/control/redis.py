"""The cluster's Redis: embedded, external or none (`redis.mode`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.backends import embedded_redis
from cluster.backends.subprocess_backend import LocalMember
from cluster.keeper.keeper import KeeperCalls
from cluster.keeper.members import RunningProcess, is_running
from cluster.spec.redis_probe import check_redis
from tandem.config.spec import RedisSpec
from tandem.errors import ConfigError

PROBE_TIMEOUT_S = 1.0


class Redis:
    """`url` is None until `start` if Redis is embedded, and always if there is none."""

    def __init__(self, spec: RedisSpec, run_dir: Path, keeper: KeeperCalls) -> None:
        self.url = spec.url
        self._mode = spec.mode
        self._run_dir = run_dir
        self._server = LocalMember("redis", keeper)  # runs only if Redis is embedded

    async def start(self) -> None:
        if self._mode == "embedded":
            start, self.url = embedded_redis.member(self._run_dir)
            if not is_running(await self._server.running(), start):
                await self._server.stop()
                await self._server.start(start)

    async def processes(self) -> tuple[RunningProcess, ...]:
        running = await self._server.running()
        return running.processes if running is not None else ()

    async def state(self) -> str:
        """The mode, or `unreachable`."""
        if self.url is None:
            return self._mode
        try:
            await asyncio.to_thread(check_redis, self.url, PROBE_TIMEOUT_S)
        except ConfigError:
            return "unreachable"
        return self._mode

    async def stop(self) -> None:
        await self._server.stop()
