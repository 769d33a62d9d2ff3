"""Every way of a request through its states, as scripts (router.testing.scenario)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.testing.scenario import Scenario
from tandem.request import EDGES, RequestState

SCRIPTS = sorted((Path(__file__).parents[2] / "data" / "scenarios").glob("*.txt"))
# Within one event: no other event finds a request there.
PASSED_THROUGH = RequestState.MIGRATING


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_events_lead_to_the_actions_of_the_script(script: Path) -> None:
    """`TANDEM_REWRITE=1` writes down what happens now: read the difference before you commit it."""
    played = Scenario().played(script.read_text())
    if os.environ.get("TANDEM_REWRITE"):
        script.write_text(played)
    assert played == script.read_text()


def test_the_scripts_take_every_edge_of_the_state_machine() -> None:
    scenario = Scenario()
    for script in SCRIPTS:
        scenario.played(script.read_text())
    edges = {(before, after) for before, targets in EDGES.items() for after in targets}
    cancelled = {(state, RequestState.CANCELLED) for state in EDGES if state is not PASSED_THROUGH}
    started = (RequestState.QUEUED, RequestState.PREFILLING, RequestState.HANDOFF, RequestState.DECODING)
    failed = {(state, RequestState.FAILED) for state in started}
    assert edges | cancelled | failed == set(scenario.edges)
