"""Every format becomes the same columns, and whatever is wrong with a file is said with its line and column."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from planner.traces.arrivals import ArrivalProcess, Diurnal, Gamma, Ramp
from planner.traces.hits import infinite_cache_hits
from planner.traces.jsonl import write_request_log
from planner.traces.read import read_trace
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.errors import InputError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 1700, "input_length": 600, "output_length": 1, "hash_ids": [4, 1]},
    {"timestamp": 4000, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]},
]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def same(one: TrafficTrace, other: TrafficTrace) -> bool:
    return all(
        np.allclose(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "prompt_tokens", "output_tokens")
    )


class TestFormats:
    def test_mooncake_with_its_blocks(self, tmp_path: Path) -> None:
        trace = read_trace(written(tmp_path, "m.jsonl", lines(*MOONCAKE)))
        assert trace.arrival_s.tolist() == [0.0, 1.5, 1.7, 4.0]
        assert trace.prefixes is not None
        assert trace.prefixes.block_tokens == 512
        assert [trace.prefixes.of(index).tolist() for index in (0, 2)] == [[0, 1, 2], [4, 1]]

    def test_azure_with_seven_digits_and_no_last_newline(self, tmp_path: Path) -> None:
        rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109"
        trace = read_trace(written(tmp_path, "a.csv", AZURE + rows))
        assert trace.arrival_s.tolist() == pytest.approx([0.0, 4.314579])
        assert trace.output_tokens.tolist() == [44, 109]

    def test_lengths_alone_are_given_arrivals_and_it_is_said(self, tmp_path: Path) -> None:
        rows = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9\n"
        path = written(tmp_path, "l.csv", rows)
        trace = read_trace(path, arrivals=Gamma(2.0))
        assert trace.prompt_tokens.tolist() == [3772, 2015]
        assert "Poisson at 2 requests/s" in trace.notes[0]
        with pytest.raises(InputError, match="--arrivals"):
            read_trace(path)

    def test_a_servegen_client_draws_its_rates_and_lengths(self, tmp_path: Path) -> None:
        written(tmp_path, "chunk-1-trace.csv", "0,0,0,,0,0\n600,2.0,1.0,Gamma,1.0,0.5\n1200,1.0,2.0,Weibull,0.6,0.7\n")
        window = {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{10: 1.0}"}
        windows = {"0": {"input_tokens": "{}", "output_tokens": "{}"}, "600": window}
        written(tmp_path, "chunk-1-dataset.json", json.dumps(windows))
        trace = read_trace(tmp_path)
        assert 1500 < len(trace) < 2100
        assert trace.prompt_tokens.mean() == pytest.approx(200, rel=0.05)
        assert (np.diff(trace.arrival_s) >= 0).all()

    def test_a_request_log_comes_back_as_it_was_written(self, tmp_path: Path) -> None:
        trace = read_trace(written(tmp_path, "m.jsonl", lines(*MOONCAKE)))
        write_request_log(trace, tmp_path / "log.jsonl")
        again = read_trace(tmp_path / "log.jsonl")
        assert same(trace, again)
        assert again.prefixes is not None
        assert again.prefixes.of(3).tolist() == [0, 1, 2]

    def test_a_request_log_may_be_out_of_order_and_names_class_and_tenant(self, tmp_path: Path) -> None:
        late = {"arrival_s": 7.0, "prompt_tokens": 5, "output_tokens": 2, "class": "batch", "tenant": "b"}
        early = {"arrival_s": 5.0, "prompt_tokens": 6, "output_tokens": 3}
        trace = read_trace(written(tmp_path, "log.jsonl", lines(late, early)))
        assert trace.arrival_s.tolist() == [0.0, 2.0]
        assert trace.prompt_tokens.tolist() == [6, 5]
        assert trace.label_of(1) == ("batch", "b")


LOG_ROW = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 2}


@pytest.mark.parametrize(
    ("name", "text", "field", "said"),
    [
        ("m.jsonl", lines(MOONCAKE[1], MOONCAKE[0]), "arrival", "line 2"),
        ("m.jsonl", lines(MOONCAKE[0]) + "\n" + lines(MOONCAKE[1]), "row", "line 2.*an empty line"),
        ("m.jsonl", lines(MOONCAKE[0] | {"input_length": -3}), "prompt tokens", "line 1.*-3"),
        ("m.jsonl", lines(MOONCAKE[0] | {"colour": 1}), "colour", "only the columns"),
        ("m.jsonl", lines(MOONCAKE[0], {"timestamp": 5, "hash_ids": []}), "input_length", "line 2"),
        ("m.jsonl", lines(MOONCAKE[0] | {"input_length": 512}), "block hashes", "at most 1 for 512 tokens"),
        ("m.jsonl", lines(MOONCAKE[0] | {"hash_ids": ["x"]}), "hash_ids", "hexadecimal"),
        ("m.jsonl", lines(MOONCAKE[0]) + "[1]\n", "row", "line 2.*JSON object"),
        ("log.jsonl", lines(LOG_ROW | {"output_tokens": 2.5}), "output_tokens", "whole number"),
        ("log.jsonl", lines(LOG_ROW | {"arrival_s": True}), "arrival_s", "a number"),
        ("log.jsonl", lines(LOG_ROW | {"block_hashes": [1]}), "block_tokens", "tokens of each block"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,374\n", "row", "line 2.*3 values"),
        ("a.csv", AZURE + "yesterday,374,44\n", "TIMESTAMP", "line 2"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,many,44\n", "ContextTokens", "whole number"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,0,44\n", "prompt tokens", "from 1"),
        ("a.csv", AZURE, "trace", "at least one request"),
        ("b.csv", "when,what\n1,2\n", "row", "num_prefill_tokens"),
        ("b.csv", "prompt_tokens,output_tokens,colour\n1,2,3\n", "colour", "line 1"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_column(tmp_path: Path, name: str, text: str, field: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_trace(written(tmp_path, name, text), arrivals=Gamma(1.0))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0,1,1,Gamma,1\n", "6 values"),
        ("0,1,1,Normal,1,1\n", "Gamma or Weibull"),
        ("9,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", "sort"),
    ],
)
def test_a_bad_servegen_client_is_refused(tmp_path: Path, rows: str, said: str) -> None:
    written(tmp_path, "chunk-1-trace.csv", rows)
    written(tmp_path, "chunk-1-dataset.json", json.dumps({"0": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}}))
    with pytest.raises(InputError, match=said):
        read_trace(tmp_path)


def test_hits_are_the_leading_run_of_blocks_seen_before_and_never_more_than_the_prompt(tmp_path: Path) -> None:
    hits = infinite_cache_hits(read_trace(written(tmp_path, "m.jsonl", lines(*MOONCAKE))))
    assert hits.hit_tokens == 0 + 1024 + 0 + 1200  # block 1 after an unseen block 4 is no hit
    assert (hits.blocks, hits.unique_blocks) == (11, 5)


class TestJitter:
    def rounded(self, folder: Path) -> Path:
        rows = [MOONCAKE[0] | {"timestamp": 3000 * (at // 10) + (at // 10 == 5)} for at in range(200)]
        return written(folder, "m.jsonl", lines(*rows))

    def test_arrivals_on_a_coarse_tick_are_spread_over_it_and_it_is_said(self, tmp_path: Path) -> None:
        path = self.rounded(tmp_path)
        as_is, spread = read_trace(path, jitter=False), read_trace(path)
        assert "rounded to 3 s" in spread.notes[0]
        assert len(np.unique(spread.arrival_s)) == 200
        assert (np.abs(spread.arrival_s - as_is.arrival_s) < 3.01).all()
        assert same(spread, read_trace(path))

    def test_other_arrivals_are_left_alone(self, tmp_path: Path) -> None:
        trace = synthetic_trace(300, Gamma(5.0), LengthSpec(10), LengthSpec(2))
        write_request_log(trace, tmp_path / "log.jsonl")
        assert read_trace(tmp_path / "log.jsonl").notes == ()


class TestSynthetic:
    @pytest.mark.parametrize(
        ("process", "mean_s", "cv"),
        [(Gamma(4.0), 0.25, 1.0), (Gamma(4.0, 3.0), 0.25, 3.0), (Ramp(4.0, 4.0, 100.0), 0.25, 1.0)],
    )
    def test_arrivals_have_the_rate_and_burstiness_asked_for(
        self, process: ArrivalProcess, mean_s: float, cv: float
    ) -> None:
        gaps = np.diff(process.times_s(40_000, np.random.default_rng(1)))
        assert gaps.mean() == pytest.approx(mean_s, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)

    def test_a_ramp_rises_and_a_day_swings(self) -> None:
        random = np.random.default_rng(1)
        ramp = Ramp(1.0, 9.0, 1000.0).times_s(5000, random)
        assert (ramp < 500).sum() / 5000 == pytest.approx(0.3, abs=0.03)
        day = Diurnal(5.0, 0.8, 1000.0).times_s(5000, random)
        assert (day < 500).sum() / 5000 == pytest.approx(0.5 + 0.8 / np.pi, abs=0.03)

    def test_shared_prefixes_are_hit_by_all_but_the_first_of_each(self) -> None:
        shared = SharedPrefixes(count=3, tokens=160, share=0.5)
        trace = synthetic_trace(4000, Gamma(5.0), LengthSpec(40, 0.5), LengthSpec(10), prefixes=shared)
        hits = infinite_cache_hits(trace)
        assert hits.unique_blocks == 30
        assert hits.hit_tokens == pytest.approx(4000 * 0.5 * 160, rel=0.05)
        assert trace.prompt_tokens.mean() == pytest.approx(40 + 80, rel=0.05)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: Gamma(0.0),
            lambda: Diurnal(1.0, 1.5),
            lambda: LengthSpec(0.5),
            lambda: SharedPrefixes(0, 1),
            lambda: synthetic_trace(0, Gamma(1.0), LengthSpec(1), LengthSpec(1)),
        ],
    )
    def test_what_cannot_be_is_refused(self, build: object) -> None:
        assert callable(build)
        with pytest.raises(InputError):
            build()


def test_a_repeated_trace_shares_nothing_between_repetitions(tmp_path: Path) -> None:
    once = read_trace(written(tmp_path, "m.jsonl", lines(*MOONCAKE)))
    twice = once.repeated(2)
    assert infinite_cache_hits(twice).hit_tokens == 2 * infinite_cache_hits(once).hit_tokens
    assert len(twice) == 8
    assert (np.diff(twice.arrival_s) > 0).all()


def test_a_stretch_keeps_its_prefixes_and_begins_at_0(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "m.jsonl", lines(*MOONCAKE)))
    stretch = trace.between(1.0, 4.0)
    assert stretch.arrival_s.tolist() == pytest.approx([0.0, 0.2])
    assert stretch.prefixes is not None
    assert stretch.prefixes.of(1).tolist() == [4, 1]
    with pytest.raises(InputError, match="expected at least one request in the selected part"):
        trace.between(2.0, 3.0)


def test_load_and_lengths_can_be_changed(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "m.jsonl", lines(*MOONCAKE)))
    assert trace.at_rate(2.0).span_s == pytest.approx(trace.span_s / 2)
    longer = trace.with_lengths(2.0, 0.01)
    assert longer.prompt_tokens.tolist() == [2400, 2200, 1200, 2400]
    assert longer.output_tokens.min() == 1
