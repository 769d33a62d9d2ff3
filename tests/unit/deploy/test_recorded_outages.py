"""What a scraper recorded of broken clusters fires the alerts, and what it recorded of a healthy one fires none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.testing.alert_rules import RULE_FILES, alerts_of, fired, groups_of, metrics_of
from cluster.testing.scraper import Recording

ROOT = Path(__file__).resolve().parents[3]
RULES = groups_of(RULE_FILES)
ALERTS = {alert["alert"] for alert in alerts_of(RULES)}
RECORDINGS = {path.stem: path for path in sorted((ROOT / "tests" / "data" / "prometheus" / "recorded").glob("*.yaml"))}
LARGEST_BYTES, LARGEST_BYTES_OF_ALL = 24_000, 400_000

each_recording = pytest.mark.parametrize("name", RECORDINGS)


def scrapes_in(values: str) -> int:
    """How many a series covers, in promtool's notation: `1x3` is four values, `_x3` three."""
    counts = 0
    for word in values.split():
        _, _, repeats = word.partition("x")
        counts += int(repeats or 1) + bool(repeats and word[0] != "_")
    return counts


def test_every_alert_fires_from_a_recording() -> None:
    assert {alert for path in RECORDINGS.values() for alert in Recording.read(path).fires} == ALERTS


def test_only_a_healthy_cluster_and_the_loss_of_one_rank_fire_nothing() -> None:
    silent = {name for name, path in RECORDINGS.items() if not Recording.read(path).fires}
    assert silent == {"healthy", "one-rank-killed"}


def test_the_recordings_are_small() -> None:
    sizes = [path.stat().st_size for path in RECORDINGS.values()]
    assert max(sizes) < LARGEST_BYTES
    assert sum(sizes) < LARGEST_BYTES_OF_ALL


@each_recording
def test_a_recording_has_the_form_that_the_script_writes(name: str, tmp_path: Path) -> None:
    recording = Recording.read(RECORDINGS[name])
    recording.write(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == RECORDINGS[name].read_text()
    assert f'"{recording.broken}"' in (ROOT / "scripts" / "record-outages.py").read_text()
    assert {"up"} < {metric for metric, _ in recording.series} <= metrics_of(RULES)
    assert max(map(scrapes_in, recording.series.values())) == recording.scrapes


@pytest.mark.system
@each_recording
def test_promtool_finds_that_a_recording_fires_what_it_says(name: str, tmp_path: Path) -> None:
    recording = Recording.read(RECORDINGS[name])
    assert fired(recording, RULES, tmp_path) == recording.fires
