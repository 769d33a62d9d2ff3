"""Follows the controller's directory of ready workers. While the controller is away, the last directory stays valid."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from tandem.backoff import Backoff
from tandem.errors import IncompatibleVersions
from tandem.rpc.directory import DirectoryGap, apply_directory
from tandem.rpc.grpc_options import CLIENT_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.rpc.versions import CONTROL_BEFORE_RANGES, CONTROL_VERSIONS, common_version, stated_versions
from tandem.v1 import cluster_pb2
from tandem.v1.cluster_pb2_grpc import ClusterStub

log = logging.getLogger(__name__)

OnDirectory = Callable[[cluster_pb2.Directory], None]


class DirectoryFollower:
    """Calls `on_directory` with each version of the directory. Reconnects with backoff.

    `connected`: the controller has sent a directory since the last connection was made.
    """

    def __init__(self, address: str, watcher: str, on_directory: OnDirectory, tls: ClusterTls | None = None) -> None:
        self._address = address
        self._watcher = watcher
        self._on_directory = on_directory
        self._tls = tls
        self._task: asyncio.Task[None] | None = None
        self.connected = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="directory")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = Backoff(first_s=0.05, most_s=2.0)
        request = cluster_pb2.WatchDirectoryRequest(
            watcher=self._watcher,
            takes_changes=True,
            protocol=CONTROL_VERSIONS.protocol,
            oldest_protocol=CONTROL_VERSIONS.oldest_protocol,
        )
        names = (self._watcher, "the controller")
        # With TLS, fail fast: a channel keeps the certificate it was opened with, so a renewed one needs a new channel.
        waits = self._tls is None
        while True:
            try:
                async with open_channel(self._address, self._tls, Identity.CONTROLLER, CLIENT_OPTIONS) as channel:
                    stub = ClusterStub(channel)
                    known: cluster_pb2.Directory | None = None
                    async for message in stub.WatchDirectory(request, wait_for_ready=waits):
                        backoff.reset()
                        common_version(CONTROL_VERSIONS, stated_versions(message, CONTROL_BEFORE_RANGES), names)
                        known = apply_directory(known, message)
                        self._on_directory(known)
                        self.connected = True
                log.info("the controller closed the directory stream; reconnecting")
            except DirectoryGap as gap:
                log.info("%s; asking for all of it", gap.message)
            except IncompatibleVersions as error:
                log.error("no directory from the controller; keeping the last: %s", error)
                backoff.skip_to_most()
            except grpc.aio.AioRpcError as error:
                log.warning("lost the controller; keeping the last directory", extra={"error": error.details()})
            except Exception:  # a bug in applying one directory must not end the task
                log.exception("failed to apply a directory; reconnecting")
            self.connected = False
            await backoff.wait()
