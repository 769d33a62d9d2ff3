"""A whole cluster of processes on this machine, with its controller in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.backends.subprocess_backend import SubprocessBackend
from cluster.control.controller import Controller
from cluster.keeper.keeper import Keeper
from cluster.spec.changes import SpecSource
from cluster.spec.resolve import resolve, with_free_ports
from tandem.config.spec import ClusterSpec
from worker.testing.session import assert_conserved, open_session

ON_FREE_PORTS: dict[str, Any] = {
    "router": {"http_port": 0, "grpc_port": 0},
    "control": {"admin_port": 0, "backend": "subprocess"},
}


def controller_of(source: dict[str, Any], folder: Path) -> Controller:
    """Of a spec, on free ports; `start` comes next. `folder`: its path is short enough for unix sockets."""
    merged = {part: keys | source.get(part, {}) for part, keys in ON_FREE_PORTS.items()}
    spec = ClusterSpec.model_validate(source | merged)
    keeper = Keeper(folder / "logs")
    return Controller(
        with_free_ports(resolve(spec, lambda what: None)),
        SubprocessBackend(keeper),
        keeper,
        folder / "run",
        folder / "logs",
        SpecSource(spec, {}),
    )


@asynccontextmanager
async def running(source: dict[str, Any], folder: Path) -> AsyncIterator[Controller]:
    """Everything is ready. Ends with a count of each worker's blocks."""
    controller = controller_of(source, folder)
    try:
        await controller.start()
        await controller.wait_ready(lambda what: None)
        yield controller
        await check_conserved(controller)
    finally:
        await controller.close()


async def check_conserved(controller: Controller) -> None:
    for slot in controller.workers.slots.values():
        assert slot.info is not None
        async with open_session(slot.info.address) as session:
            await assert_conserved(session)
