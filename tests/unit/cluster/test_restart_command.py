"""`tandem restart` only watches: what it tells, and how it ends."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from cluster.cli.admin_client import Admin
from cluster.cli.commands import scaling
from tandem.errors import ConfigError, UnavailableError
from tandem.v1 import cluster_pb2, cluster_pb2_grpc


class Controller(cluster_pb2_grpc.ClusterServicer):
    """Answers with each of `answers` once, and with the last for ever."""

    def __init__(self, *answers: cluster_pb2.RollingRestart) -> None:
        self.answers = list(answers)

    async def GetRestart(self, request: Any, context: Any) -> cluster_pb2.RollingRestart:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def at(restart_id: str = "a", **progress: Any) -> cluster_pb2.RollingRestart:
    return cluster_pb2.RollingRestart(restart_id=restart_id, worker_ids=["decode-0", "decode-1"], **progress)


async def watch(monkeypatch: pytest.MonkeyPatch, *answers: cluster_pb2.RollingRestart) -> int:
    monkeypatch.setattr(scaling, "WATCH_S", 0.001)
    server = grpc.aio.server()
    controller = Controller(*answers)  # type: ignore[abstract]  # other calls are not made
    cluster_pb2_grpc.add_ClusterServicer_to_server(controller, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        return await scaling._watch_restart(Admin(address))
    finally:
        await server.stop(None)


async def test_each_worker_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = at(restarted=["decode-0"])
    assert (
        await watch(monkeypatch, at(), first, first, at(restarted=["decode-0"], left=["decode-1"], is_over=True)) == 0
    )
    assert capsys.readouterr().out.splitlines() == ["decode-0 is ready again", "decode-1 left the cluster"]


async def test_a_restart_that_ended_before_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="decode-0 cannot start"):
        await watch(monkeypatch, at(), at(is_over=True, failure="decode-0 cannot start: no weights"))


async def test_there_must_be_a_restart_to_watch_and_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no restart of all workers has begun"):
        await watch(monkeypatch, cluster_pb2.RollingRestart())
    with pytest.raises(ConfigError, match="another restart has begun since"):
        await watch(monkeypatch, at("a"), at("b"))


async def test_a_controller_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "WATCH_S", 0.001)
    monkeypatch.setattr(scaling, "RECONNECT_S", 0.2)
    with pytest.raises(UnavailableError, match="no controller answers"):
        await scaling._watch(Admin("127.0.0.1:1"), at())
