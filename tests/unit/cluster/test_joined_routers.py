"""Routers that join: one member of a name, changed one after another, gone when their call ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from cluster.control import joined_routers
from cluster.control.joined_routers import JoinedRouters, model_files, settings_id
from tandem.config.launch import RouterLaunch
from tandem.config.router import RouterSpec
from tandem.errors import InputError, OverloadedError, UnavailableError
from tandem.v1 import cluster_pb2


def request(name: str, control_address: str = "h:3", **more: str) -> cluster_pb2.JoinRouterRequest:
    found = cluster_pb2.JoinRouterRequest(
        router_id=name, http_address="h:1", grpc_address="h:2", control_address=control_address, protocol=1, cluster="c"
    )
    for field, value in more.items():
        setattr(found, field, value)
    return found


class Site:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = self.earlier = RouterSpec(drain_timeout_s=0.0)
        self.serving: set[str] = set()
        self.routers = JoinedRouters("c", None, self._launch)
        monkeypatch.setattr(joined_routers, "is_serving", self._is_serving)
        monkeypatch.setattr(joined_routers, "LEAVE_MARGIN_S", 60.0)
        monkeypatch.setattr(joined_routers, "POLL_S", 0.01)
        monkeypatch.setattr(joined_routers, "GONE_S", 60.0)

    def change(self) -> None:
        """Gives all routers other settings."""
        self.spec = RouterSpec(drain_timeout_s=0.0, max_queued_requests=9)

    def _launch(self, name: str, is_its_turn: bool) -> RouterLaunch:
        spec = self.spec if is_its_turn else self.earlier
        return RouterLaunch(
            cluster="c", router_id=name, router=spec, models=(), controller_address="h:0", redis_url=None
        )

    async def _is_serving(self, address: str, tls: object) -> bool:
        return address in self.serving

    @asynccontextmanager
    async def joined(self, name: str, control: str, has: str = "") -> AsyncIterator[asyncio.Queue[str]]:
        """What the router is told after its first message. `has`: the id of its settings."""
        told: asyncio.Queue[str] = asyncio.Queue()

        async def run() -> None:
            async with aclosing(self.routers.follow(request(name, control, settings_id=has))) as settings:
                async for each in settings:
                    told.put_nowait(each.launch)

        task = asyncio.create_task(run())
        self.first = await told.get()
        self.serving.add(control)
        yield told
        self.serving.discard(control)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


async def test_a_router_that_has_settings_keeps_them_until_its_turn(site: Site) -> None:
    """A controller died in the middle of a change: the routers that join the next one do not change all at once."""
    has = settings_id(site._launch("a", False))
    site.change()
    async with site.joined("a", "a:1", has) as first, site.joined("b", "b:1", settings_id(site._launch("b", False))):
        assert site.first == ""
        async with site.joined("c", "c:1"):
            assert '"max_queued_requests":256' in site.first, "nor does one that has none get those of the change"
        settling = asyncio.create_task(site.routers.settle(60.0))
        assert '"max_queued_requests":9' in await first.get()
        await asyncio.sleep(0.05)
        assert [each.settings_id == has for each in site.routers._joined.values()] == [False, False]
        assert not settling.done()
        settling.cancel()


async def test_a_router_that_comes_back_and_ends_stops_the_change(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site.joined("a", "a:1"):
        site.change()
        settling = asyncio.create_task(site.routers.settle(60.0))
        await asyncio.sleep(0.05)
    async with site.joined("a", "a:1"):
        assert '"max_queued_requests":9' in site.first
        site.serving.clear()
        await asyncio.sleep(0.05)
    monkeypatch.setattr(joined_routers, "GONE_S", 0.05)
    with pytest.raises(UnavailableError, match="a ended before it served with other settings"):
        await settling


async def test_a_router_that_leaves_during_a_change_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_routers, "GONE_S", 0.05)
    async with site.joined("a", "a:1"):
        site.change()
        settling = asyncio.create_task(site.routers.settle(60.0))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await settling
    assert site.routers.control_addresses == {}


async def test_those_that_come_back_are_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.create_task(site.routers.wait_for(["a", "b"]))
    async with site.joined("b", "b:1"):
        await asyncio.sleep(0.05)
        assert not waiting.done()
        async with site.joined("a", "a:1"):
            async with asyncio.timeout(60):
                await waiting
    monkeypatch.setattr(joined_routers, "GONE_S", 0.05)
    async with asyncio.timeout(60):
        await site.routers.wait_for(["a"])


async def test_a_router_that_ignores_other_settings_stops_the_change(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_routers, "LEAVE_MARGIN_S", 0.2)
    async with site.joined("a", "a:1"):
        site.change()
        with pytest.raises(UnavailableError, match="a did not take other settings"):
            await site.routers.settle(60.0)


async def test_another_of_the_same_name_is_refused_while_it_serves(site: Site) -> None:
    async with site.joined("a", "a:1"):
        with pytest.raises(InputError, match="another router named a serves at a:1"):
            await anext(site.routers.follow(request("a", "a:2")))
        async with site.joined("a", "a:1"):  # itself, over another connection
            assert site.routers.control_addresses == {"a": "a:1"}
        site.serving.clear()
        async with site.joined("a", "a:2"):
            (status,) = await site.routers.status()
            assert (status.name, status.state.value) == ("a", "ready")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cluster", "another"),
        ("http_address", "h" * 4000 + ":1"),
        ("grpc_address", "\x1b[2Jh:1"),
        ("control_address", ""),
        ("control_address", "h"),
        ("settings_id", "x" * 33),
    ],
)
async def test_what_no_router_sends_is_refused_by_its_field(site: Site, field: str, value: str) -> None:
    with pytest.raises(InputError, match=field):
        await anext(site.routers.follow(request("a", **{field: value})))


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
