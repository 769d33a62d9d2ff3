"""A router that no controller started. It joins a cluster, gets its settings from the controller, and is a member for
as long as it follows them.

A controller that is away costs nothing: the router goes on with the settings it has, and joins the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.backoff import Backoff
from tandem.config.launch import ROUTER_ID, RouterLaunch, ServedModel
from tandem.config.security import TlsSpec
from tandem.errors import ConfigError, IncompatibleVersions
from tandem.files import cache_dir
from tandem.rpc.grpc_options import CLIENT_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.rpc.versions import CONTROL_BEFORE_RANGES, CONTROL_VERSIONS, common_version, stated_versions
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """`controller`: host:port of the controller's admin service. `host`: an address of this machine on which clients
    and the controller reach the router. `leave_s`: how long it goes on serving, not ready, before it ends for other
    settings. `tls`: `security.tls`, if the cluster has it."""

    controller: str
    cluster: str
    router_id: str
    host: str
    http_port: int
    grpc_port: int
    control_port: int
    leave_s: float
    tls: TlsSpec | None

    @classmethod
    def parse(cls, given: argparse.Namespace) -> JoinOptions:
        """Raises ConfigError."""
        files = {"cert": given.tls_cert, "key": given.tls_key, "ca": given.tls_ca}
        if any(files.values()) and not all(files.values()):
            raise ConfigError("--tls-cert, --tls-key, --tls-ca: expected all three, or none", field="--tls-cert")
        if not re.fullmatch(ROUTER_ID, given.name or ""):
            raise ConfigError(
                f"--name: expected letters, digits, '.', '_' and '-', at most 63, got {given.name!r}", field="--name"
            )
        return cls(
            controller=given.join,
            cluster=given.cluster,
            router_id=given.name,
            host=given.host,
            http_port=given.http_port,
            grpc_port=given.grpc_port,
            control_port=given.control_port,
            leave_s=given.leave_seconds,
            tls=TlsSpec(**files) if given.tls_cert else None,
        )

    def address(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def launch(self, sent: RouterLaunch, folders: dict[str, Path]) -> RouterLaunch:
        """What the controller sent, with what is this router's own. `folders`: of the models' files. Raises ConfigError
        if the settings leave it open to strangers."""
        try:
            sent.auth.check_hosts({"--host": self.host})
        except ValueError as error:
            raise ConfigError(str(error), field="--host") from None
        own = {
            "http_host": self.host,
            "http_port": self.http_port,
            "grpc_host": self.host,
            "grpc_port": self.grpc_port,
        }
        return sent.model_copy(
            update={
                "router_id": self.router_id,
                "router": sent.router.model_copy(update=own),
                "models": tuple(
                    model.model_copy(update={"model_dir": str(folders[model.name])}) for model in sent.models
                ),
                "controller_address": self.controller,
                "control_address": self.address(self.control_port),
                "tls": self.tls,
            }
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join", type=_address, metavar="HOST:PORT", help="join the cluster of the controller at this admin address"
    )
    parser.add_argument("--cluster", default="tandem", help="the cluster's name (default: tandem)")
    parser.add_argument("--name", help="the router's name, which no other has; required")
    parser.add_argument("--host", default="127.0.0.1", help="this machine's address for others (default: 127.0.0.1)")
    parser.add_argument("--http-port", type=_port, default=8000, help="OpenAI API (default: 8000)")
    parser.add_argument("--grpc-port", type=_port, default=50051, help="gRPC API (default: 50051)")
    parser.add_argument("--control-port", type=_port, default=50053, help="for the controller (default: 50053)")
    parser.add_argument(
        "--leave-seconds",
        type=float,
        default=0.0,
        help="how long it serves on, not ready, before it ends for other settings (default: 0)",
    )
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"security.tls.{name}, if the cluster has TLS")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, such as 10.0.0.5:50052, got {text!r}")
    return text


def _port(text: str) -> int:
    if not 0 < (port := int(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text}")
    return port


class Membership:
    """Keeps the router in the cluster from `join` to `close`."""

    def __init__(self, options: JoinOptions) -> None:
        self._options = options
        self._tls = ClusterTls.maybe(options.cluster, Identity.ROUTER, options.tls)
        self._first: asyncio.Future[RouterLaunch] = asyncio.get_running_loop().create_future()
        self._settings_id = ""  # of what it has
        self._task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()  # the controller wants it with other settings than it has

    async def join(self) -> RouterLaunch:
        """Waits for a controller that takes it. Raises ConfigError."""
        self._task = asyncio.create_task(self._follow(), name="membership")
        sent = await self._first
        return self._options.launch(sent, await self._fetch(sent))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        options, ours = self._options, CONTROL_VERSIONS
        request = cluster_pb2.JoinRouterRequest(
            router_id=options.router_id,
            http_address=options.address(options.http_port),
            grpc_address=options.address(options.grpc_port),
            control_address=options.address(options.control_port),
            protocol=ours.protocol,
            oldest_protocol=ours.oldest_protocol,
            cluster=options.cluster,
            leave_s=options.leave_s,
        )
        names, said = (options.router_id, "the controller"), ""
        backoff = Backoff(first_s=FIRST_BACKOFF_S, most_s=MAX_BACKOFF_S)
        while True:
            request.settings_id = self._settings_id
            try:
                async with open_channel(options.controller, self._tls, Identity.CONTROLLER, CLIENT_OPTIONS) as channel:
                    async for message in cluster_pb2_grpc.ClusterStub(channel).JoinRouter(request):
                        common_version(ours, stated_versions(message, CONTROL_BEFORE_RANGES), names)
                        said = ""
                        backoff.reset()
                        if message.launch and not self._take(message):
                            break  # it differs in what only a newer release knows: join again with its id
                reason = "the controller ended the membership"
            except IncompatibleVersions as error:
                reason = error.message
            except grpc.aio.AioRpcError as error:
                reason = f"the controller at {options.controller}: {error.details()} ({error.code().name})"
            except Exception:  # nor may a bug end the membership
                log.exception("failed to follow the controller's settings")
                reason = "a bug"
            if reason != said:
                log.warning("not in the cluster, trying again: %s", reason)
                said = reason
            await backoff.wait()

    def _take(self, message: cluster_pb2.RouterSettings) -> bool:
        """Whether these are the first settings, or others than it has."""
        sent = RouterLaunch.model_validate_json(message.launch, extra="ignore")
        if self._first.done() and sent != self._first.result():
            self.changed.set()
            return True
        self._settings_id = message.settings_id
        if self._first.done():
            return False
        self._first.set_result(sent)
        return True

    async def _fetch(self, sent: RouterLaunch) -> dict[str, Path]:
        """The files of every model, by its name, from the controller: this machine need not have the models."""
        models = sent.models
        root = cache_dir() / "routers" / self._options.router_id
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
        folders = {model.name: root / str(number) for number, model in enumerate(models)}
        backoff = Backoff(first_s=FIRST_BACKOFF_S, most_s=MAX_BACKOFF_S)
        while True:
            try:
                async with open_channel(
                    self._options.controller, self._tls, Identity.CONTROLLER, CLIENT_OPTIONS
                ) as channel:
                    for model in models:
                        await _fetch_files(channel, model, folders[model.name])
                return folders
            except grpc.aio.AioRpcError as error:
                log.warning("cannot get the models' tokenizers, trying again: %s", error.details())
            await backoff.wait()


async def _fetch_files(channel: grpc.aio.Channel, model: ServedModel, folder: Path) -> None:
    stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
    files: dict[str, bytearray] = {}
    async for part in stub.GetModelFiles(cluster_pb2.GetModelFilesRequest(model=model.name)):
        files.setdefault(Path(part.name).name, bytearray()).extend(part.data)  # in the folder, whatever was sent
    await asyncio.to_thread(_write, folder, files)


def _write(folder: Path, files: dict[str, bytearray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
