"""What a machine has no more of is named once a minute, and its return once."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from tandem.telemetry.resource_watch import Resource, ResourceWatch, shortage
from tandem.testing.disks import SmallDisk


def test_a_message_comes_once_a_minute_and_the_return_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times_s = [1000.0]
    watch = ResourceWatch({}, lambda: times_s[-1])
    found = {(Resource.DISK, "the disk of /x"): "full: free space there"}
    for passed_s in (0.0, 1.0, 58.0, 1.0, 59.0):
        times_s.append(times_s[-1] + passed_s)
        watch.note(found)
        assert watch.exhausted == {Resource.DISK}
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    for _ in range(2):
        watch.note({})
    assert watch.exhausted == frozenset()
    assert [record.getMessage() for record in caplog.records[2:]] == ["the disk of /x: there is room again"]
    watch.note(found)
    assert len(caplog.records) == 4, "a new shortage is told at once"


def test_a_full_disk_is_found_by_the_setting_that_moves_it(disk: SmallDisk) -> None:
    watch = ResourceWatch({"router.record": disk.path, "XDG_STATE_HOME": Path("/missing")})
    key = (Resource.DISK, f"the disk of {disk.path}")
    assert key not in watch.find()
    disk.fill()
    assert watch.find()[key] == "full: free space there, or move it with router.record"
    disk.free()
    assert key not in watch.find()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), "the disk is full (/run/x): free space there"),
        (OSError(errno.EMFILE, "Too many open files"), "no open file is left: raise `ulimit -n`"),
        (OSError(errno.EACCES, "Permission denied", "/x"), "[Errno 13] Permission denied: '/x'"),
    ],
)
def test_an_error_says_what_to_do(error: OSError, text: str) -> None:
    assert shortage(error) == text
