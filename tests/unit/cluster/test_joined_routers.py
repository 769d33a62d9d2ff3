"""Routers that join: one member of a name, changed one after another, gone when their call ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from cluster.control import joined_routers
from cluster.control.joined_routers import JoinedRouters, model_files
from tandem.config.launch import RouterLaunch
from tandem.config.spec import RouterSpec
from tandem.errors import InputError, OverloadedError, UnavailableError
from tandem.v1 import cluster_pb2


def request(name: str, control: str = "h:3") -> cluster_pb2.JoinRouterRequest:
    return cluster_pb2.JoinRouterRequest(
        router_id=name, http_address="h:1", grpc_address="h:2", control_address=control, protocol=1
    )


class Site:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = RouterSpec(drain_timeout_s=0.0)
        self.serving: set[str] = set()
        self.routers = JoinedRouters(None, self._launch)
        monkeypatch.setattr(joined_routers, "is_serving", self._is_serving)
        monkeypatch.setattr(joined_routers, "LEAVE_S", 0.0)
        monkeypatch.setattr(joined_routers, "POLL_S", 0.01)
        monkeypatch.setattr(joined_routers, "GONE_S", 0.2)

    def _launch(self, name: str) -> RouterLaunch:
        return RouterLaunch(
            cluster="c", router_id=name, router=self.spec, models=(), controller_address="h:0", redis_url=None
        )

    async def _is_serving(self, address: str, tls: object) -> bool:
        return address in self.serving

    @asynccontextmanager
    async def joined(self, name: str, control: str) -> AsyncIterator[asyncio.Queue[str]]:
        """What the router is told."""
        told: asyncio.Queue[str] = asyncio.Queue()

        async def run() -> None:
            async with aclosing(self.routers.follow(request(name, control))) as settings:
                async for each in settings:
                    told.put_nowait(each.launch)

        task = asyncio.create_task(run())
        await told.get()
        self.serving.add(control)
        yield told
        self.serving.discard(control)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


async def test_a_router_that_comes_back_and_never_serves_stops_the_change(site: Site) -> None:
    async with site.joined("a", "a:1"):
        site.spec = RouterSpec(drain_timeout_s=0.0, max_queued_requests=9)
        settling = asyncio.create_task(site.routers.settle(0.6))
        await asyncio.sleep(0.05)
    async with site.joined("a", "a:2"):
        site.serving.clear()
        await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError, match="a did not serve again"):
        await settling


async def test_a_router_that_leaves_during_a_change_is_not_waited_for(site: Site) -> None:
    async with site.joined("a", "a:1"):
        site.spec = RouterSpec(drain_timeout_s=0.0, max_queued_requests=9)
        settling = asyncio.create_task(site.routers.settle(30.0))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await settling
    assert site.routers.control_addresses == {}


async def test_another_of_the_same_name_takes_its_place(site: Site) -> None:
    async with site.joined("a", "a:1"), site.joined("a", "a:2"):
        assert site.routers.control_addresses == {"a": "a:2"}
        (status,) = await site.routers.status()
        assert (status.name, status.state.value) == ("a", "ready")


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 64, "router-0"])
async def test_names_that_could_be_taken_for_others_are_refused(site: Site, name: str) -> None:
    with pytest.raises(InputError, match="router_id"):
        await anext(site.routers.follow(request(name)))


async def test_there_is_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_routers, "MAX_JOINED", 1)
    async with site.joined("a", "a:1"):
        with pytest.raises(OverloadedError):
            await anext(site.routers.follow(request("b")))


def test_model_files_are_those_that_routers_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"t" * (joined_routers.PART_BYTES + 1))
    (tmp_path / "config.json").write_bytes(b"c")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    parts = [(part.name, len(part.data)) for part in model_files(tmp_path)]
    assert parts == [("config.json", 1), ("tokenizer.json", joined_routers.PART_BYTES), ("tokenizer.json", 1)]
