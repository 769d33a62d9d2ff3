"""Every format becomes the same columns, and whatever is wrong with a file is said with its line and column."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.traces.arrivals import ArrivalProcess, Diurnal, Gamma, Ramp
from planner.traces.hits import infinite_cache_hits
from planner.traces.jsonl import write_request_log
from planner.traces.read import read_trace, with_gap_noted
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import PrefixBlocks, TrafficTrace
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

    @pytest.mark.parametrize(
        ("times", "notes"),
        [
            (("2026-11-01T10:00:00Z", "2026-11-01T10:00:02.5Z"), ()),
            (("2026-11-01T12:00:00+02:00", "2026-11-01T10:00:02.5Z"), ()),
            (("10", "12.5"), ("read as seconds",)),
            (("1793527200.0", "1793527202.5"), ("read as seconds",)),
            (("1793527200000", "1793527202500"), ("read as milliseconds",)),
            (("1793527200000000", "1793527202500000"), ("read as microseconds",)),
            (("1793527200000000000", "1793527202500000000"), ("read as nanoseconds",)),
        ],
        ids=["ISO", "zones", "seconds", "Unix", "ms", "us", "ns"],
    )
    def test_a_log_with_times_needs_no_arrivals(
        self, tmp_path: Path, times: tuple[str, str], notes: tuple[str, ...]
    ) -> None:
        rows = f"Created_At,user,prompt_tokens,completion_tokens\n{times[1]},b,20,3\n{times[0]},a,10,2\n"
        trace = read_trace(written(tmp_path, "log.csv", rows))
        assert trace.arrival_s.tolist() == pytest.approx([0.0, 2.5], abs=1e-3)
        assert trace.prompt_tokens.tolist() == [10, 20]
        assert trace.notes == (*(f"Created_At: {each}" for each in notes), "columns not used: user")

    def test_a_column_in_milliseconds_is_one_by_its_name(self, tmp_path: Path) -> None:
        rows = '"timestamp_ms" , "input_tokens",output_tokens\n0,10.0,2\n\n2500,20.0,3\n'
        assert read_trace(written(tmp_path, "log.csv", rows)).arrival_s.tolist() == [0.0, 2.5]

    def test_the_largest_time_decides_the_unit_and_the_newest_may_stand_first(self, tmp_path: Path) -> None:
        rows = "time,input_tokens,output_tokens\n1793600000000,10,2\n1793500000000,20,3\n"
        assert read_trace(written(tmp_path, "log.csv", rows)).arrival_s.tolist() == [0.0, 100_000.0]

    def test_requests_without_an_answer_are_left_out_and_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        path.write_text("timestamp,prompt_tokens,completion_tokens\n0,10,5\n1,20,0\n2,30,7\n")
        trace = read_trace(path)
        assert trace.output_tokens.tolist() == [5, 7]
        assert "left out: 1 of 3 requests, which have no answer" in trace.notes

    def test_a_log_may_hold_the_prompts(self, tmp_path: Path) -> None:
        rows = f"time,prompt,input_tokens,output_tokens\n0,{'x' * 200_000},10,2\n1,y,20,3\n"
        assert read_trace(written(tmp_path, "log.csv", rows)).notes[-1] == "columns not used: prompt"

    def test_a_gap_is_noted(self, tmp_path: Path) -> None:
        rows = "time,input_tokens,output_tokens\n" + "".join(f"{at},10,2\n" for at in (0, 5, 10, 4000, 4005))
        trace = read_trace(written(tmp_path, "log.csv", rows))
        assert with_gap_noted(trace).notes[-1] == "no request for 3,990 s after the first 10 s"
        assert with_gap_noted(trace.head(3)).notes == trace.notes

    def test_arrivals_are_not_drawn_where_they_are_recorded(self, tmp_path: Path) -> None:
        path = written(tmp_path, "log.csv", "time,input_tokens,output_tokens\n0,10,2\n1,10,2\n")
        with pytest.raises(InputError, match=r"--arrivals: expected none, because log.csv has times of its own"):
            read_trace(path, arrivals=Gamma(2.0))

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

    def test_bursts_do_not_end_a_servegen_window_early(self, tmp_path: Path) -> None:
        """Of intervals with a coefficient of variation of 32, 850 often take less than a window of 600 s."""
        written(tmp_path, "chunk-1-trace.csv", "0,1.0,32,Gamma,0.001,1000\n")
        lengths = {"input_tokens": "{100: 1.0}", "output_tokens": "{10: 1.0}"}
        written(tmp_path, "chunk-1-dataset.json", json.dumps({"0": lengths}))
        assert max(len(read_trace(tmp_path, seed=seed)) for seed in range(10)) > 850

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
        ("a.csv", AZURE + "nan,374,44\n", "TIMESTAMP", "line 2.*expected seconds, or a time such as"),
        ("a.csv", AZURE + "1,374,44\n2026-11-01 10:00:00,1,1\n", "TIMESTAMP", "line 3.*form of the first"),
        ("a.csv", AZURE + "2026-11-01 10:00:00,1,1\n2026-11-01 10:00:00Z,1,1\n", "TIMESTAMP", "form of the first"),
        ("a.csv", "time,time,input_tokens,output_tokens\n0,0,1,1\n", "header", "different columns"),
        ("a.csv", AZURE + "1e300,374,44\n", "TIMESTAMP", "line 2.*seconds"),
        ("b.csv", "when,prompt_tokens,output_tokens\n1,2,3\n", "when", r"and a time \(timestamp, "),
        ("a.csv", AZURE + "1,1000000000,44\n", "prompt tokens", "line 2.*from 1 to 10000000"),
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


class TestMeasured:
    """What a recording says that its requests took."""

    ROWS = (
        {"arrival_s": 1e9 + 5.0, "prompt_tokens": 20, "output_tokens": 3, "ttft_s": 0.2, "decode_s": 0.3},
        {"arrival_s": 1e9 + 2.0, "prompt_tokens": 10, "output_tokens": 2, "ttft_s": 0.1, "decode_s": 0.05},
        {"arrival_s": 1e9 + 9.0, "prompt_tokens": 30, "output_tokens": 4},
    )

    def read(self, folder: Path, *rows: object) -> TrafficTrace:
        return read_trace(written(folder, "log.jsonl", lines(*rows)), jitter=False)

    def test_it_is_read_in_the_order_of_arrival(self, tmp_path: Path) -> None:
        measured = self.read(tmp_path, *self.ROWS).measured
        assert measured is not None
        assert measured.ttft_s[:2].tolist() == [0.1, 0.2]
        assert measured.decode_s[:2].tolist() == [0.05, 0.3]
        assert np.isnan([measured.ttft_s[2], measured.decode_s[2]]).all()
        assert measured.began_s == 1e9 + 2.0

    def test_a_recording_of_an_earlier_release_has_none(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, self.ROWS[2]).measured is None

    def test_it_goes_with_its_requests(self, tmp_path: Path) -> None:
        trace = self.read(tmp_path, *self.ROWS)
        later = trace.between(1.0, 5.0)
        assert later.measured is not None
        assert (later.measured.ttft_s.tolist(), later.measured.began_s) == ([0.2], 1e9 + 5.0)
        write_request_log(trace, path := tmp_path / "again.jsonl")
        again = read_trace(path, jitter=False).measured
        assert again is not None
        assert trace.measured is not None
        assert again.ttft_s[:2].tolist() == trace.measured.ttft_s[:2].tolist()
        assert again.decode_s[:2].tolist() == trace.measured.decode_s[:2].tolist()
        assert np.isnan(again.ttft_s[2])

    def test_changed_requests_took_something_else(self, tmp_path: Path) -> None:
        trace = self.read(tmp_path, *self.ROWS)
        for changed in (trace.at_rate(2.0), trace.with_lengths(2.0, 1.0), trace.resampled(1), trace.repeated(2)):
            assert changed.measured is None
        assert trace.at_rate(1.0).measured is trace.measured

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"ttft_s": -0.1}, "line 1, ttft_s: expected at least 0 s, got -0.1"),
            ({"decode_s": "fast"}, "line 1, decode_s: expected a number, got 'fast'"),
            ({"decode_s": float("nan")}, "line 1, decode_s: expected a number"),
        ],
    )
    def test_a_time_that_is_none_is_refused(self, tmp_path: Path, change: dict[str, object], said: str) -> None:
        with pytest.raises(InputError, match=said):
            self.read(tmp_path, self.ROWS[0] | change)

    def test_one_time_without_the_other_is_refused(self, tmp_path: Path) -> None:
        row = {name: value for name, value in self.ROWS[0].items() if name != "decode_s"}
        with pytest.raises(InputError, match="line 1, decode_s: expected a value, because the row has the other time"):
            self.read(tmp_path, row)


class TestFollowedBy:
    def drawn(self, seed: int, **changes: SharedPrefixes) -> TrafficTrace:
        return synthetic_trace(40, Gamma(1.0), LengthSpec(300), LengthSpec(20), seed=seed, **changes)

    def test_the_second_begins_when_it_is_said_and_shares_nothing_with_the_first(self) -> None:
        shared = SharedPrefixes(3, 64)
        first, second = (self.drawn(seed, prefixes=shared) for seed in (1, 2))
        both = first.followed_by(second, 100.0)
        assert len(both) == 80
        assert both.arrival_s[40:].tolist() == (100.0 + second.arrival_s).tolist()
        assert both.prompt_tokens.tolist() == [*first.prompt_tokens.tolist(), *second.prompt_tokens.tolist()]
        hits = [infinite_cache_hits(each).hit_tokens for each in (first, second, both)]
        assert hits[2] == hits[0] + hits[1]
        assert same(both.stretch(40, 80), second)

    def test_traces_of_another_kind_are_refused(self) -> None:
        with pytest.raises(InputError, match="synthetic: expected prefixes, blocks and labels as synthetic has"):
            self.drawn(1).followed_by(self.drawn(2, prefixes=SharedPrefixes(3, 64)), 100.0)


class TestResampled:
    """Other traffic of the same kind."""

    def trace(self) -> TrafficTrace:
        drawn = synthetic_trace(
            400, Gamma(10.0, 2.0), LengthSpec(900, 0.8), LengthSpec(80, 0.8), prefixes=SharedPrefixes(10, 256), seed=3
        )
        assert drawn.prefixes is not None
        return drawn

    def test_its_requests_come_in_rows_of_the_trace_with_the_times_between_them(self) -> None:
        trace = self.trace()
        found = trace.resampled(1)
        assert len(found) == len(trace)
        assert found.arrival_s[0] == 0.0
        pairs = {
            (int(trace.prompt_tokens[at]), int(trace.prompt_tokens[at + 1])): trace.arrival_s[at + 1]
            - trace.arrival_s[at]
            for at in range(len(trace) - 1)
        }
        kept = [
            gap
            for at, gap in enumerate(np.diff(found.arrival_s))
            if pairs.get((int(found.prompt_tokens[at]), int(found.prompt_tokens[at + 1]))) == pytest.approx(gap)
        ]
        assert len(kept) >= 0.9 * len(trace), "only where one block of 20 ends and the next begins are they apart"

    def test_each_number_is_one_traffic_with_the_rate_and_lengths_of_the_trace(self) -> None:
        trace = self.trace()
        many = [trace.resampled(number) for number in range(40)]
        assert len({each.span_s for each in many}) == 40
        assert trace.resampled(7).arrival_s.tolist() == many[7].arrival_s.tolist()
        assert np.mean([each.span_s for each in many]) == pytest.approx(trace.span_s, rel=0.1)
        assert np.mean([each.prompt_tokens.mean() for each in many]) == pytest.approx(
            trace.prompt_tokens.mean(), rel=0.1
        )

    def test_a_request_that_comes_again_shares_only_what_it_shared(self) -> None:
        """Otherwise every repetition would be a hit of its whole prompt."""
        prefixes = PrefixBlocks(16, np.array([1, 2, 1, 3, 4]), np.array([2, 4, 5]))
        rows = prefixes.rows(np.array([0, 1, 0, 2, 2]))
        found = [rows.of(number).tolist() for number in range(5)]
        assert found[0] == [1, 2]
        assert found[1] == [1, 3]
        assert found[2][0] == 1
        assert found[3] == [4]
        fresh = [found[2][1], found[4][0]]
        assert len({1, 2, 3, 4, *fresh}) == 6
        trace = self.trace()
        resampled = infinite_cache_hits(trace.resampled(2)).token_hit_rate
        assert resampled == pytest.approx(infinite_cache_hits(trace).token_hit_rate, abs=0.05)

    def test_classes_go_with_their_requests(self) -> None:
        labels, label = (("a", ""), ("b", "")), (np.arange(400) % 2).astype(np.int32)
        trace = replace(self.trace(), labels=labels, label=label, prompt_tokens=label.astype(np.int64) + 1)
        found = trace.resampled(3)
        assert found.label is not None
        assert (found.prompt_tokens == found.label + 1).all()


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

    def test_days_far_shorter_than_the_time_between_requests_take_no_memory_each(self) -> None:
        times_s = Diurnal(1e-4, 0.5, 0.01).times_s(20_000, np.random.default_rng(1))
        assert np.diff(times_s).mean() == pytest.approx(1e4, rel=0.05)
        assert (np.modf(times_s / 0.01)[0] < 0.5).mean() == pytest.approx(0.5 + 0.5 / np.pi, abs=0.02)

    def test_shared_prefixes_are_hit_by_all_but_the_first_of_each(self) -> None:
        shared = SharedPrefixes(count=3, tokens=160, share=0.5)
        trace = synthetic_trace(4000, Gamma(5.0), LengthSpec(40, 0.5), LengthSpec(10), prefixes=shared)
        hits = infinite_cache_hits(trace)
        assert trace.prefixes is not None
        assert len(set(trace.prefixes.ids.tolist())) == 30
        assert hits.hit_tokens == pytest.approx(4000 * 0.5 * 160, rel=0.05)
        assert trace.prompt_tokens.mean() == pytest.approx(40 + 80, rel=0.05)

    def test_the_note_has_the_mean_lengths_that_were_drawn(self) -> None:
        shared = SharedPrefixes(count=4, tokens=500, share=1.0)
        trace = synthetic_trace(100, Gamma(5.0), LengthSpec(1000), LengthSpec(100), prefixes=shared)
        assert trace.notes == ("Poisson at 5 requests/s, prompts of 1500, answers of 100 tokens on average",)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: Gamma(0.0),
            lambda: Gamma(1e-300),
            lambda: Gamma(1.0, 1e200),
            lambda: Ramp(1.0, 2.0, float("inf")),
            lambda: Diurnal(1.0, 1.5),
            lambda: LengthSpec(0.5),
            lambda: LengthSpec(100, 1e200),
            lambda: SharedPrefixes(0, 1),
            lambda: SharedPrefixes(1 << 40, 1),
            lambda: SharedPrefixes(1, 1 << 40),
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
