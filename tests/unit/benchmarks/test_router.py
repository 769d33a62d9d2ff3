"""The router benchmark runs, whole and small, and its lines are what `make bench-router` promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
INDEX = {"index.bytes_per_block": "B", "index.events_per_s": "events/s", "index.lookup_256_us": "us"}
PEERS = {"index.peer": "look-ups/s", "index.peer_events_per_s": "events/s"}  # only where the peer is installed


def test_every_figure_of_the_index_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.router", "--quick", "--figure", "index"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = {line["figure"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert INDEX.keys() <= lines.keys() <= (INDEX | PEERS).keys()
    for name, line in lines.items():
        assert list(line) == ["figure", "value", "unit", "reference", "ratio"]
        assert line["unit"] == (INDEX | PEERS)[name]
        assert line["value"] > 0
