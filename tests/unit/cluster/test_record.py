"""The record of a cluster: written after each change, and again if it could not be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.control import record
from cluster.control.record import ClusterRecord, DrainRecord, RecordWriter, ScaleRecord, Successor
from cluster.spec.changes import SpecSource
from tandem.config.spec import ClusterSpec


class Kept:
    """Where a record is kept; the first writes fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.records: list[ClusterRecord] = []

    async def keep(self, text: str) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("Ray does not answer")
        self.records.append(ClusterRecord.model_validate_json(text))


def build(**changes: Any) -> ClusterRecord:
    under_way = (
        ScaleRecord(model="tiny", prefill=1, decode=2),
        DrainRecord(worker_id="decode-0", epoch=7, restart=True, move=False),
    )
    flags = {"models.0.source": "tiny", "router.http_port": 0}
    fields = {
        "holder": "k1",
        "version": "1.0",
        "fingerprints": ("f",),
        "spec": ClusterSpec(),
        "flags": flags,
        "admin_address": "h:1",
    }
    return ClusterRecord(**(fields | changes), workers=(), routers=(), under_way=under_way)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_record_is_read_as_it_was_written_and_written_again_if_it_could_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "RETRY_S", 0.01)
    kept = Kept(failures=2)
    writer = RecordWriter(build, kept.keep)
    writer.touch()
    await writer.write()
    assert kept.failures == 2  # nothing before the start
    writer.start()
    await until(lambda: kept.records)
    assert kept.records == [build()]
    writer.touch()
    await until(lambda: len(kept.records) == 2)
    await writer.close()


async def test_a_change_that_cannot_be_noted_is_refused() -> None:
    kept = Kept(failures=10)
    writer = RecordWriter(build, kept.keep)
    writer.start()
    with pytest.raises(OSError, match="Ray does not answer"):
        await writer.write()
    await writer.close()


def spec(**router: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"router": router})


def sized(prefill: int, decode: int) -> ClusterSpec:
    pools = {"prefill": {"workers": prefill}, "decode": {"workers": decode}}
    return ClusterSpec.model_validate({"models": [ClusterSpec().models[0].model_dump() | pools]})


def successor(holder: str, source: ClusterSpec, version: str = "1.0", fingerprint: str = "f") -> Successor:
    return Successor(holder, version, (fingerprint,), SpecSource(source, {}))


def too_far(version: str) -> str:
    return f"it runs Tandem 1.0, and this is {version}: to keep it serving, upgrade one minor version at a time"


def test_a_controller_that_is_found_by_an_address_of_its_own_may_move() -> None:
    """As the head pod of the chart, whose address changes with each pod, and which starts no routers."""

    def at(ip: str, **router: object) -> ClusterSpec:
        control = {"admin_host": ip, "admin_port": 50050, "advertised_address": "control:50050"}
        there = {"replicas": 0, "http_host": ip, "grpc_host": ip} | router
        insecure = {"allow_plaintext": True, "auth": {"mode": "none"}}
        return ClusterSpec.model_validate({"control": control, "router": there, "security": insecure})

    record = build().model_copy(update={"spec": at("10.0.0.1")})
    assert successor("k2", at("10.0.0.2")).refusal(record) == ""
    assert "router.replicas" in successor("k2", at("10.0.0.2", replicas=1)).refusal(record)
    own = record.model_copy(update={"spec": at("10.0.0.1", replicas=1)})
    refusal = successor("k2", at("10.0.0.2", replicas=1)).refusal(own)
    assert refusal == "router.http_host, router.grpc_host changed", "its routers listen where they did"


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        (successor("k1", ClusterSpec()), ""),
        (successor("k1", spec(replicas=2)), ""),  # `tandem apply` may have changed what the keeper was started with
        (successor("k2", ClusterSpec()), ""),
        (successor("k2", sized(2, 2)), ""),
        (successor("k2", spec(replicas=2, http_port=81)), "router.replicas, router.http_port changed"),
        (successor("k2", spec(max_migrations=7)), ""),
        (successor("k2", ClusterSpec(), fingerprint="g"), "its models have changed"),
        (successor("k1", ClusterSpec(), version="1.1"), ""),
        (successor("k2", ClusterSpec(), version="1.1.2"), ""),
        (successor("k2", ClusterSpec(), version="1.1", fingerprint="g"), "its models have changed"),
        (successor("k1", ClusterSpec(), version="1.2"), too_far("1.2")),
        (successor("k2", ClusterSpec(), version="2.0"), too_far("2.0")),
        (successor("k1", ClusterSpec(), version="unknown"), too_far("unknown")),
    ],
)
def test_a_cluster_is_taken_over_unless_it_would_not_be_what_was_asked_for(asked: Successor, refusal: str) -> None:
    assert sorted(asked.refusal(build()).split(", ")) == sorted(refusal.split(", "))


def test_another_keeper_may_ask_for_other_sizes_and_the_same_keeper_keeps_those_that_were_applied() -> None:
    applied = build(spec=sized(2, 3))
    assert successor("k1", sized(1, 1)).adapted(applied) == applied
    adapted = successor("k2", sized(1, 4)).adapted(applied)
    name = applied.spec.models[0].served_name
    assert adapted.under_way == (*applied.under_way, ScaleRecord(model=name, prefill=1, decode=4))
    assert adapted.spec == sized(1, 4)
    assert successor("k2", sized(2, 3)).adapted(applied).under_way == applied.under_way
