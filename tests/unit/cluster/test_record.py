"""The record of a cluster: written after each change, and again if it could not be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cluster.control import record
from cluster.control.record import ClusterRecord, DrainRecord, RecordWriter, ScaleRecord
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


def build() -> ClusterRecord:
    under_way = (
        ScaleRecord(model="tiny", prefill=1, decode=2),
        DrainRecord(worker_id="decode-0", epoch=7, restart=True, move=False),
    )
    flags = {"models.0.source": "tiny", "router.http_port": 0}
    return ClusterRecord(spec=ClusterSpec(), flags=flags, workers=(), routers=(), under_way=under_way)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
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
