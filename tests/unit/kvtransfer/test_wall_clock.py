"""Steps of the wall clock change nothing: deadlines, leases and beats live on the monotonic clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtransfer
from kvtransfer.testing.cluster import FakeCluster

PACKAGES = ("kvtransfer", "worker", "prefill_worker", "decode_worker", "tandem")
WALL_CLOCK = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
ALLOWED = {
    "kvtransfer/testing/agent.py",  # it makes the steps
    "tandem/telemetry/audit.py",  # its lines tell the time
}


def uses_of_wall_clock(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in WALL_CLOCK:
                yield f"{path.name}:{node.lineno} {owner}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"{path.name}:{node.lineno} from time import time" for it in node.names if it.name == "time")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_code_of_a_handoff_looks_at_the_wall_clock(package: str) -> None:
    root = Path(kvtransfer.__file__).parents[1]
    found = [
        use
        for path in sorted((root / package).rglob("*.py"))
        if str(path.relative_to(root)) not in ALLOWED and "v1" not in path.parts
        for use in uses_of_wall_clock(path)
    ]
    assert found == []


@pytest.mark.acceptance(12, here="transfer agents")
async def test_agents_whose_wall_clock_jumps_by_hours_hand_off_as_ever(cluster: FakeCluster) -> None:
    jumping = ("kvtransfer.testing.agent", "--wall-clock-steps")
    await cluster.start("prefill-0", connects=True, ttl_s=60.0, launcher=jumping)
    await cluster.start("decode-0", ttl_s=60.0, launcher=jumping)
    for number in range(100):
        await cluster.request("prefill-0", "decode-0", number)
    assert cluster.tally.failed.keys() <= {"peer_lost"}, "as when a machine stands still"
    assert cluster.tally.failures < 10
    await cluster.check_conservation()
