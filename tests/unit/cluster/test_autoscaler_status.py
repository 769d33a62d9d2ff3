"""Where an operator sees what the autoscaler decided, and how it is asked for."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from cluster.cli.commands.status import show, to_json
from cluster.cli.commands.up import UpFlags
from router.dashboard.cluster_status import scaling, with_autoscaler
from router.dashboard.events import EventKind, Severity
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.v1 import cluster_pb2

STATUS = cluster_pb2.ClusterStatus(
    cluster="tandem",
    autoscaler=cluster_pb2.Autoscaler(
        mode="dry_run",
        outlooks=[cluster_pb2.ScalingOutlook(model="tiny", words="within the objectives: TTFT 12 % of 2 s")],
        decisions=[
            cluster_pb2.ScalingDecision(
                at_unix_s=1000.0, model="tiny", action="start", prefill=2, decode=2, reason="2P:1D to 2P:2D: why",
                outcome="InsufficientMemory: no room",
            ),
            cluster_pb2.ScalingDecision(
                at_unix_s=900.0, model="tiny", action="change_roles", prefill=2, decode=1, reason="1P:2D to 2P:1D: why",
                outcome="dry_run",
            ),
        ],
    ),
)  # fmt: skip


def up(config: Path | None = None, *, autoscale: bool = False, dry_run: bool = False) -> UpFlags:
    return UpFlags(
        config, None, None, None, None, None, None, None, None, None, None, None, None, None,
        autoscale=autoscale, dry_run=dry_run,
    )  # fmt: skip


def shown(status: cluster_pb2.ClusterStatus) -> str:
    text = io.StringIO()
    show(status, Console(file=text, width=200, highlight=False))
    return text.getvalue()


def test_status_says_how_things_are_and_the_last_decisions_with_their_reasons() -> None:
    text = shown(STATUS)
    assert "autoscaler dry run, tiny: within the objectives: TTFT 12 % of 2 s" in text
    assert "tiny 2P:1D to 2P:2D: why (InsufficientMemory: no room)" in text
    assert text.index("2P:1D to 2P:2D") < text.index("1P:2D to 2P:1D: why (dry run)")
    found = to_json(STATUS)["autoscaler"]
    assert (found["mode"], [each["action"] for each in found["decisions"]]) == ("dry_run", ["start", "change_roles"])
    assert found["decisions"][0]["outcome"] == "InsufficientMemory: no room"


def test_status_says_nothing_of_an_autoscaler_that_is_off() -> None:
    off = cluster_pb2.ClusterStatus(autoscaler=cluster_pb2.Autoscaler(mode="off"))
    assert "autoscaler" not in shown(off)
    assert to_json(off)["autoscaler"] == {"mode": "off", "outlooks": {}, "decisions": []}


def test_the_dashboard_shows_decisions_as_events() -> None:
    found = with_autoscaler(scaling([]), STATUS.autoscaler)
    assert found.autoscaler == "dry run: within the objectives: TTFT 12 % of 2 s"
    assert [(each.kind, each.severity) for each in found.decisions] == [
        (EventKind.SCALING, Severity.BAD), (EventKind.SCALING, Severity.INFO),
    ]  # fmt: skip
    assert with_autoscaler(scaling([]), cluster_pb2.Autoscaler()).autoscaler == "off"


def test_it_is_asked_for_on_the_command_line() -> None:
    spec = up(autoscale=True, dry_run=True).source().spec
    assert (spec.autoscaler.enabled, spec.autoscaler.dry_run) == (True, True)
    with pytest.raises(ConfigError, match=r"--dry-run: expected together with --autoscale"):
        up(dry_run=True).source()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"min_workers": 4, "max_workers": 3}, r"max_workers: expected at least min_workers \(4\), got 3"),
        ({"decode": {"min": 3, "max": 2}}, r"max: expected at least min \(3\), got 2"),
        ({"decode": {"min": 0}}, "decode: expected limits of at least 1"),
        (
            {"max_workers": 2, "prefill": {"min": 2}},
            r"max_workers: expected at least prefill\.min \+ decode\.min \(3\)",
        ),
        ({"interval_s": 0}, "interval_s"),
        ({"headroom": 1.5}, "headroom"),
    ],
)
def test_limits_that_cannot_be_are_refused(section: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ClusterSpec.model_validate({"autoscaler": section})


def test_without_an_objective_there_is_nothing_to_keep(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("router: {classes: [{name: any}]}\nautoscaler: {enabled: true}")
    flags = up(config)
    with pytest.raises(ConfigError, match=r"autoscaler\.enabled: expected a class .* ttft_slo_s or tpot_slo_s"):
        flags.source()
