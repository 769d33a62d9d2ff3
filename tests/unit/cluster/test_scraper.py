"""The scraper keeps what Prometheus would have kept, in the notation of promtool."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.testing.exporter_pages import HEAD, NEXT_HEAD, Pods, served
from cluster.testing.scraper import STALE, Recording, Scraper, Series, Target, noted

PHASE = "kube_pod_status_phase"


@pytest.mark.parametrize(
    ("values", "notation"),
    [
        ([5.0], "5"),
        ([5.0, 5.0, 5.0, 5.0], "5x3"),
        ([0.0, 2.0, 4.0, 6.0], "0+2x3"),
        ([6.0, 4.0, 2.0, 7.0], "6-2x2 7"),
        ([0.1, 0.2, 0.3], "0.1 0.2 0.3"),
        ([None, None, 1.0], "_x2 1"),
        ([1.0, STALE, None, 1.0], "1 stale _x1 1"),
        ([1.0, STALE, 1.0], "1 stale 1"),
    ],
)
def test_values_are_written_as_promtool_reads_them(values: list[float | None], notation: str) -> None:
    assert noted(values) == notation


def test_a_series_that_was_missing_ends_once_and_may_come_back() -> None:
    series = Series()
    for scrape, value in enumerate([1.0, None, None, 2.0]):
        if value is None:
            series.end(scrape)
        else:
            series.put(scrape, value)
    assert noted(series.values) == "1 stale _x1 2"


def test_labels_of_the_target_win_unless_it_honors_those_of_the_page() -> None:
    own, of_target = {"pod": "a", "gpu": "0"}, {"pod": "exporter"}
    assert dict(Target("", of_target).labelled(own)) == {"pod": "exporter", "exported_pod": "a", "gpu": "0"}
    assert dict(Target("", of_target, honors=True).labelled(own)) == own


async def test_a_recording_holds_a_target_that_changes_its_page_and_then_goes(tmp_path: Path) -> None:
    pods, scraper = Pods(), Scraper({PHASE, "up"}, 15.0)
    with served(pods) as target:
        scraper.targets.append(target)
        await scraper.scrape()
        pods.phase = {NEXT_HEAD: "Pending"}
        await scraper.scrape()
        scraper.targets.clear()
        await scraper.scrape()
    await scraper.close()
    recording = Recording("the head pod is lost", 15.0, scraper.scrapes, (), scraper.series())
    recording.write(tmp_path / "recorded.yaml")
    assert Recording.read(tmp_path / "recorded.yaml") == recording
    found = {(name, *(dict(labels).get(each) for each in ("pod", "phase"))): values
             for (name, labels), values in recording.series.items()}  # fmt: skip
    assert found["up", None, None] == "1x1 stale"
    assert found[PHASE, HEAD, "Running"] == "1 stale"
    assert found[PHASE, NEXT_HEAD, "Pending"] == "_x1 1 stale"
