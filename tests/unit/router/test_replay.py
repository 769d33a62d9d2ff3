"""Recordings that are whole, cut off, of another version, changed or too large; and observers that fail."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.commands.replay import run_replay
from router.observe.trace_store import Traces
from router.policies.pace_estimates import Estimates
from router.policies.placement import named_policy
from router.policies.types import Candidate, PlacementQuery
from router.prefix_index.mirror import WorkerKey
from router.request_terms import RequestTerms
from router.requests import actions as act
from router.requests import events as ev
from router.requests.facts import Facts
from router.requests.placer import PlacementSeen
from router.requests.recording.files import SEGMENTS, RecordingFiles
from router.requests.recording.recorder import KIND, VERSION, Recorder, RecordingHeader, encoder
from router.requests.recording.replay import RecordedRequest, Replay, ReplayReport, Step
from router.requests.state_machine import RequestRun
from router.testing.scenario import TextlessAssembler
from router.workers.fleet import Fleet
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import ConfigError, InputError
from tandem.request import FinishReason, SamplingParams
from tandem.testing.models import FakeClock
from tandem.v1 import worker_pb2
from tests.unit.router.conftest import Cluster

D0, P0 = WorkerKey("d0", 1), WorkerKey("p0", 1)
SECRET = 424242
PROPOSALS = {1: (4, 4, True), 6: (2, 1, False), 20: (3, 0, True)}  # by the number of the token that tells of them


@dataclass(frozen=True)
class Token:
    token_id: int
    cached_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    from_prediction: bool = False


def new_run() -> RequestRun:
    request = RecordedRequest("r", "m", (SECRET, SECRET), 2, SamplingParams(max_tokens=99), block_tokens=2)
    return RequestRun(request, TextlessAssembler(), RequestTerms(""), 0.0, 1)


def header(version: int = VERSION, *, text: bool = False) -> bytes:
    return encoder.encode(
        RecordingHeader(KIND, version, "9.9", "router-0", text, 1, RouterSpec().model_dump(mode="json"))
    )


def recorded(*, text: bool = False) -> list[bytes]:
    """One request with a handoff and 40 tokens."""
    written = [header(text=text)]
    recorder, run = Recorder(written.append, text=text), new_run()
    began: list[ev.Event] = [ev.Submitted(), ev.Queued(), ev.Started(D0, P0), ev.Reserved(D0, "ticket", 0)]
    tokens = [
        ev.TokenSampled(P0 if not number else D0, Token(SECRET, 0, *PROPOSALS.get(number, ()))) for number in range(40)
    ]
    for number, event in enumerate([*began, *tokens, ev.AttemptEnded(D0, FinishReason.STOP)]):
        recorder.on(run, event, number / 8).clear()
    return written


def replay(lines: list[bytes]) -> ReplayReport:
    return Replay().run(io.BytesIO(b"".join(line + b"\n" for line in lines)))


@pytest.mark.parametrize("text", [False, True])
def test_a_recording_replays_the_same(text: bool) -> None:
    report = replay(recorded(text=text))
    assert (report.runs, report.tokens, report.first, report.skipped) == (1, 38, None, {})


def test_what_was_proposed_is_in_the_recording_and_counts_again() -> None:
    end = json.loads(recorded()[-1])["actions"][-1]
    counts = {
        "accepted_tokens": 5,
        "unused_tokens": 4,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 3,
    }
    assert end["usage"] == {"prompt_tokens": 2, "completion_tokens": 40, "cached_tokens": 0} | counts
    changed = [line.replace(b"[3,0,true]", b"[3,2,true]") for line in recorded()]
    assert changed != recorded()
    assert replay(changed).differences == 1


def test_without_text_no_token_of_prompt_or_answer_is_written() -> None:
    assert str(SECRET).encode() not in b"".join(recorded())
    assert str(SECRET).encode() in b"".join(recorded(text=True))


def test_of_a_recording_that_is_cut_off_the_rest_is_replayed() -> None:
    lines = recorded()
    report = replay([*lines[:-1], lines[-1][:20]])
    assert (report.runs, report.events, report.first) == (1, len(lines) - 4, None)
    assert report.skipped == {"cut off, or written by another version": 1}


def test_a_request_that_began_before_the_recording_is_named_and_left_out() -> None:
    lines = recorded()
    report = replay([lines[0], *lines[3:]])
    assert report.skipped == {"of a request that began before the recording": len(lines) - 3}
    assert report.first is None


def test_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"expected version 2 or 3, got 1 \(tandem 9.9\); replay it with the release"):
        replay([header(1)])


@pytest.mark.parametrize("first", [b"\n", b"[" * 100_000, b"{}", b'{"type": "header"}', b"GIF89a"])
def test_another_file_is_refused(first: bytes) -> None:
    with pytest.raises(InputError, match=r"expected a file that router\.record wrote"):
        replay([first])


def test_an_empty_recording_says_so() -> None:
    with pytest.raises(InputError, match="the router has recorded nothing in it yet"):
        replay([])


def test_a_line_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.recording.replay.MAX_LINE_BYTES", 1 << 16)
    lines = recorded()
    report = replay([*lines[:2], b"x" * (1 << 18), *lines[2:]])
    assert (report.runs, report.first) == (1, None)
    assert list(report.skipped.values()) == [1]


def test_the_first_difference_is_shown_with_both_sides() -> None:
    lines = recorded()
    at = next(number for number, line in enumerate(lines) if b'"Reserve"' in line)
    changed: dict[str, Any] = json.loads(lines[at])
    changed["actions"][-1]["sender"] = ["p9", 1]
    report = replay([*lines[:at], json.dumps(changed).encode(), *lines[at + 1 :]])
    assert report.differences == 1
    assert report.first is not None
    assert (report.first.line, report.first.request_id, report.first.what) == (at + 1, "r", "Started")
    assert report.first.recorded != report.first.replayed


def test_tokens_of_another_time_are_a_difference() -> None:
    lines = recorded()
    at = next(number for number, line in enumerate(lines) if b'"type":"tokens"' in line)
    changed = json.loads(lines[at])
    changed["tokens"][3][0] += 0.5
    report = replay([*lines[:at], json.dumps(changed).encode(), *lines[at + 1 :]])
    assert report.first is not None
    assert report.first.what == "38 tokens"


def test_segments_are_bounded_and_each_replays_by_itself(tmp_path: Path) -> None:
    for _ in range(2):  # a second start goes on after the first
        files = RecordingFiles(tmp_path, "router-0", segment_bytes=4096)
        files.recorder(RouterSpec(), seed=1, text=False)
        for _ in range(40):
            for line in recorded()[1:]:
                files.write(line)
        files.close()
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == SEGMENTS
    for path in kept:
        with path.open("rb") as source:
            assert Replay().run(source).first is None


def test_a_folder_that_cannot_be_written_is_refused_by_its_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"router\.record: .*file") as refused:
        RecordingFiles(tmp_path / "file", "router-0")
    assert refused.value.field == "router.record"


def test_an_observer_that_fails_is_logged_once_and_counted_and_others_still_see_the_fact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts, run, seen = Facts(), new_run(), []

    def fail(run: RequestRun, fact: act.Joined, now_s: float) -> None:
        raise ZeroDivisionError("of its own")

    facts.subscribe(act.Joined, "broken", fail)
    facts.subscribe(act.Joined, "sound", lambda run, fact, now_s: seen.append(fact.at_s))
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            facts.publish(run, act.Joined(float(number)), float(number))
    assert seen == [0.0, 1.0, 2.0]
    assert facts.failures == {"broken": 3}
    assert len(caplog.records) == 1


def test_a_report_of_a_request_whose_trace_is_gone_is_no_failure_of_the_observer() -> None:
    """Reports of handoffs come up to seconds after the end; hundreds of requests may have ended since."""
    facts, run = Facts(), new_run()
    traces = Traces(Fleet("router-0", Estimates(FakeClock())))
    traces.subscribe(facts)
    report = worker_pb2.HandoffDone(request_id="r.1", sent=worker_pb2.SendStages())
    facts.publish(run, act.HandoffSeen("r.1", 0.0, 0, None, report), 1.0)
    assert not facts.failures
    assert traces.reported(run, "r.1") is None


def test_a_recording_that_fails_keeps_no_action_from_the_request(caplog: pytest.LogCaptureFixture) -> None:
    def full(line: bytes) -> None:
        raise OSError("no space")

    recorder, run = Recorder(full, text=False), new_run()
    for event in (ev.Submitted(), ev.Queued()):
        recorder.on(run, event, 0.0)
    actions = recorder.on(run, ev.Started(D0, None), 1.0)
    assert [type(each) for each in actions] == [act.AttemptStarted, act.Generate]
    assert recorder.failures == 3
    assert len(caplog.records) == 1


def test_lines_that_do_not_follow_from_those_before_are_named() -> None:
    lines = recorded()
    without_queued = [line for line in lines if b'"Queued"' not in line]
    report = replay(without_queued)
    assert "damaged, or lines before it are missing" in report.skipped
    damaged = json.loads(lines[2])
    damaged["event"] = {"type": "WorkerGone", "worker": 7, "error": {}}
    report = replay([*lines[:2], json.dumps(damaged).encode()])
    assert len(report.skipped) == 1


def test_a_configuration_of_another_release_is_refused() -> None:
    other: dict[str, Any] = json.loads(header())
    other["spec"]["no_such_key"] = 1
    with pytest.raises(InputError, match="is not of this release"):
        replay([json.dumps(other).encode()])


def test_recordings_are_private_and_what_a_stopped_thread_would_write_does_not_pile_up(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path / "r", "router-0")
    files.recorder(RouterSpec(), seed=1, text=True)
    files.write(b"{}")
    files.close()
    (path,) = (tmp_path / "r").iterdir()
    assert (path.stat().st_mode & 0o077, path.parent.stat().st_mode & 0o077) == (0, 0)
    for _ in range(40):
        files.write(b"x" * (1 << 20))
    assert files.dropped >= 20


def test_only_segments_of_its_own_count_and_are_deleted(tmp_path: Path) -> None:
    others = [
        tmp_path / name for name in ("router-0-notes.jsonl", "router-0-extra-000001.jsonl", "router-01-000001.jsonl")
    ]
    for path in others:
        path.write_text("kept")
    for _ in range(SEGMENTS + 2):
        files = RecordingFiles(tmp_path, "router-0")
        files.recorder(RouterSpec(), seed=1, text=False)
        files.close()
    assert [path.read_text() for path in others] == ["kept"] * 3
    own = sorted(set(tmp_path.iterdir()) - set(others))
    assert [path.name for path in own] == [f"router-0-{number:06}.jsonl" for number in range(3, SEGMENTS + 3)]
    first, second = (RecordingFiles(tmp_path, "router-0") for _ in range(2))  # two processes under one id
    for each in (first, second):
        each.recorder(RouterSpec(), seed=1, text=False)
        each.close()
    with (tmp_path / f"router-0-{SEGMENTS + 3:06}.jsonl").open("rb") as source:
        assert Replay().run(source).skipped == {}


@pytest.mark.parametrize(
    "event",
    [
        {"type": "WorkerGone", "worker": ["d0", 1]},
        {"type": "AttemptEnded"},
        {"type": "TokenSampled", "worker": ["d0", 1]},
        "nested",
    ],
)
def test_a_damaged_event_is_named_and_the_rest_is_replayed(event: object) -> None:
    lines = recorded()
    line = json.dumps({**json.loads(lines[4]), "event": event}).encode()
    if event == "nested":
        line = line.replace(b'"nested"', b'{"type":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    report = replay([*lines[:4], line, *lines[4:]])
    assert sum(report.skipped.values()) >= 1
    assert report.runs == 1


def test_a_placement_with_measured_transfers_is_placed_again_the_same() -> None:
    written = [header()]
    recorder, run = Recorder(written.append, text=False), new_run()
    recorder.on(run, ev.Submitted(), 0.0)
    decode = Candidate("d0", 1, 0, 0, 0, 0, 9, 9)
    far = Candidate("p0", 1, 0, 0, 0, 0, 9, 9, transfer_to={("d0", 1): 1.0})
    near = Candidate("p1", 1, 0, 0, 0, 0, 9, 9, transfer_to={("d0", 1): 1e-6})
    query = PlacementQuery(4096)
    outcome = named_policy(RouterSpec(), seed=1).place(query, [decode], [far, near])
    recorder.placements.append(PlacementSeen(query, [decode], [far, near], outcome))
    recorder.placed(run, 1.0)
    assert recorder.failures == 0
    steps: list[Step] = []
    report = Replay(steps.append).run(io.BytesIO(b"".join(line + b"\n" for line in written)))
    assert (report.placements, report.first, report.skipped) == (1, None, {})
    (placement,) = (step for step in steps if step.event == "placement")
    assert [each["type"] for each in placement.actions] == ["Outcome", "Decode", "Prefill", "Prefill"]
    assert placement.actions[0]["outcome"][2] == ["p1", 1], "the one with the quicker transfer"


def replay_of(folder: Path) -> ReplayReport:
    (file,) = folder.iterdir()
    with file.open("rb") as source:
        return Replay().run(source)


class TestRouter:
    """A real router that records."""

    @pytest.fixture(params=[False, True], ids=["without text", "with text"])
    def spec(self, tmp_path: Path, request: pytest.FixtureRequest) -> RouterSpec:
        always, folder = Disaggregation.ALWAYS, str(tmp_path / "recordings")
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=always, record=folder, record_text=request.param)

    async def test_every_placement_is_recorded_and_scores_of_a_prompt_with_a_stop_token(
        self, cluster: Cluster, spec: RouterSpec
    ) -> None:
        cluster.says("fine")
        for number in range(3):  # long enough for a measured transfer
            await cluster.openai.completions.create(model="tiny", prompt=[70 + number] * 320)
        scored = {"model": "tiny", "prompt": [5, 2, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 3}
        assert (await cluster.http.post("/v1/completions", json=scored)).status_code == 200
        await cluster.settled()
        await cluster.app.close()
        report = replay_of(Path(spec.record or ""))
        assert (report.runs, report.placements, report.differences, report.skipped) == (4, 4, 0, {})


def test_the_command_refuses_a_request_that_the_recording_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in recorded()))
    assert run_replay(path, "r", steps=False) == 0
    with pytest.raises(InputError, match=r"--request: expected the id of a request in this recording, got 'nosuch'"):
        run_replay(path, "nosuch", steps=False)
