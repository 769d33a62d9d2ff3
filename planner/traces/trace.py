"""The common form of all traces: columns of numbers. A million requests take some tens of megabytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InputError

MAX_TOKENS = 10_000_000  # the longest context of a published model
DEFAULT_CLASS = ""


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """The prefixes that prompts share. Request i begins with the blocks `ids[ends[i - 1] : ends[i]]` of `block_tokens`
    tokens each; the last may be partial. Two requests share a prefix as far as their ids agree. Tokens after the blocks
    are not shared."""

    block_tokens: int
    ids: NDArray[np.int64]
    ends: NDArray[np.int64]

    def of(self, index: int) -> NDArray[np.int64]:
        start = int(self.ends[index - 1]) if index else 0
        return self.ids[start : int(self.ends[index])]

    def stretch(self, start: int, end: int) -> PrefixBlocks:
        before = int(self.ends[start - 1]) if start else 0
        ids = self.ids[before : int(self.ends[end - 1])]
        return replace(self, ids=ids, ends=self.ends[start:end] - before)

    def rows(self, index: NDArray[np.int64]) -> PrefixBlocks:
        """Of these requests. A request that comes again shares what others shared with it, not what it had alone."""
        _, at, holders = np.unique(self.ids, return_inverse=True, return_counts=True)
        is_shared, fresh = holders[at] > 1, int(self.ids.max(initial=0)) + 1
        seen: set[int] = set()
        rows: list[NDArray[np.int64]] = []
        for each in index.tolist():
            start = int(self.ends[each - 1]) if each else 0
            row = self.ids[start : int(self.ends[each])]
            if each in seen:
                new = fresh + np.arange(len(row))
                row, fresh = np.where(is_shared[start : start + len(row)], row, new), fresh + len(row)
            seen.add(each)
            rows.append(row)
        return replace(self, ids=np.concatenate(rows), ends=np.cumsum([len(row) for row in rows]))


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """What a cluster took for each request, in seconds; NaN: not measured.

    Args:
        ttft_s: [n], from receipt to the first token. decode_s: [n], from the first token to the last.
        began_s: when the first request arrived, in the clock of the file.
    """

    ttft_s: NDArray[np.float64]
    decode_s: NDArray[np.float64]
    began_s: float = 0.0

    @property
    def e2e_s(self) -> NDArray[np.float64]:
        return self.ttft_s + self.decode_s

    def rows(self, index: NDArray[np.int64] | slice) -> MeasuredTimes:
        return replace(self, ttft_s=self.ttft_s[index], decode_s=self.decode_s[index])


@dataclass(frozen=True, slots=True)
class TrafficTrace:
    """Requests in order of arrival; the first arrives at 0.

    Args:
        arrival_s: [n], seconds. prompt_tokens, output_tokens: [n], at least 1 each.
        prefixes: None if the source has no information on shared prefixes.
        labels: (class, tenant) pairs; `label` [n]: the index of each request. The empty class is the router's default.
        notes: changes made to the source, shown with the results.
        measured: of a recorded cluster. None: the source has no such times, or the requests were changed since.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prefixes: PrefixBlocks | None = None
    labels: tuple[tuple[str, str], ...] = ((DEFAULT_CLASS, ""),)
    label: NDArray[np.int32] | None = None
    notes: tuple[str, ...] = field(default=())
    measured: MeasuredTimes | None = None

    def __post_init__(self) -> None:
        if not len(self.arrival_s):
            raise InputError(f"{self.name}: expected at least one request, got none", field="trace")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from first to last arrival."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def requests_per_s(self) -> float:
        return len(self) / self.span_s if self.span_s else float("inf")

    def label_of(self, index: int) -> tuple[str, str]:
        """Class and tenant."""
        return self.labels[0 if self.label is None else int(self.label[index])]

    def with_used_labels(self) -> TrafficTrace:
        """Without those that no request has."""
        if self.label is None:
            return self
        used, label = np.unique(self.label, return_inverse=True)
        return replace(self, labels=tuple(self.labels[each] for each in used), label=label.astype(np.int32))

    def head(self, count: int) -> TrafficTrace:
        """The first `count` requests."""
        return self.stretch(0, count)

    def stretch(self, start: int, end: int) -> TrafficTrace:
        """Requests [start, end), shifted so the first arrives at 0. Raises InputError when there are none."""
        start, end = max(0, start), min(end, len(self))
        if end <= start:
            raise InputError(
                f"{self.name}: expected at least one request in the selected part, got none", field="trace"
            )
        arrival_s = self.arrival_s[start:end]
        return replace(
            self,
            arrival_s=arrival_s - arrival_s[0],
            prompt_tokens=self.prompt_tokens[start:end],
            output_tokens=self.output_tokens[start:end],
            prefixes=None if self.prefixes is None else self.prefixes.stretch(start, end),
            label=None if self.label is None else self.label[start:end],
            measured=self.measured
            and replace(self.measured.rows(slice(start, end)), began_s=self.measured.began_s + float(arrival_s[0])),
        )

    def rows(self, index: NDArray[np.int64], arrival_s: NDArray[np.float64]) -> TrafficTrace:
        """The requests of these rows, at other times."""
        return replace(
            self,
            arrival_s=arrival_s,
            prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index],
            prefixes=None if self.prefixes is None else self.prefixes.rows(index),
            label=None if self.label is None else self.label[index],
            measured=self.measured and self.measured.rows(index),
        )

    def resampled(self, seed: int) -> TrafficTrace:
        """Other traffic of this kind: blocks of requests in a row, drawn at random, with the times between them."""
        count = len(self)
        index = drawn_blocks(count, np.random.default_rng(seed))
        gaps_s = np.append(np.diff(self.arrival_s), self.span_s / count)
        arrival_s = np.concatenate([[0.0], np.cumsum(gaps_s[index])[:-1]])
        return replace(self.rows(index, arrival_s), notes=(*self.notes, f"resampled ({seed})"), measured=None)

    def between(self, start_s: float, end_s: float) -> TrafficTrace:
        """Requests that arrive in [start_s, end_s)."""
        start, end = np.searchsorted(self.arrival_s, [start_s, end_s])
        return self.stretch(int(start), int(end))

    def at_rate(self, factor: float) -> TrafficTrace:
        """The same requests at `factor` times the rate."""
        if factor == 1.0:
            return self
        notes = (*self.notes, f"load x {factor:g}")
        return replace(self, arrival_s=self.arrival_s / factor, notes=notes, measured=None)

    def with_lengths(self, prompt_factor: float, output_factor: float) -> TrafficTrace:
        """Scales prompts and answers. The shared prefix of a prompt keeps its length."""
        return replace(
            self,
            prompt_tokens=_scaled(self.prompt_tokens, prompt_factor),
            output_tokens=_scaled(self.output_tokens, output_factor),
            notes=(*self.notes, f"prompts x {prompt_factor:g}, answers x {output_factor:g}"),
            measured=None,
        )

    def followed_by(self, other: TrafficTrace, at_s: float) -> TrafficTrace:
        """This trace, and another whose first request arrives at `at_s`, not before the last of this one. They share
        no prefixes with each other. Raises InputError if one lacks prefixes or they have other blocks or labels."""
        mine, others = self.prefixes, other.prefixes
        block_tokens = [None if each is None else each.block_tokens for each in (mine, others)]
        if block_tokens[0] != block_tokens[1] or self.labels != other.labels:
            raise InputError(f"{other.name}: expected prefixes, blocks and labels as {self.name} has", field="trace")
        prefixes = None
        if mine is not None and others is not None:
            distinct = int(mine.ids.max(initial=-1)) + 1
            prefixes = PrefixBlocks(
                mine.block_tokens,
                np.concatenate([mine.ids, others.ids + distinct]),
                np.concatenate([mine.ends, others.ends + len(mine.ids)]),
            )
        labels = [np.zeros(len(each), np.int32) if each.label is None else each.label for each in (self, other)]
        return replace(
            self,
            arrival_s=np.concatenate([self.arrival_s, at_s + other.arrival_s]),
            prompt_tokens=np.concatenate([self.prompt_tokens, other.prompt_tokens]),
            output_tokens=np.concatenate([self.output_tokens, other.output_tokens]),
            prefixes=prefixes,
            label=None if self.label is None and other.label is None else np.concatenate(labels),
            measured=None,
        )

    def repeated(self, times: int) -> TrafficTrace:
        """Repeats the trace in sequence. Repetitions share no prefixes with each other."""
        period_s = self.span_s + 1.0 / self.requests_per_s
        shifts = np.repeat(np.arange(times), len(self))
        prefixes = self.prefixes
        if prefixes is not None:
            per_time = int(prefixes.ends[-1])
            distinct = int(prefixes.ids.max(initial=0)) + 1
            prefixes = PrefixBlocks(
                prefixes.block_tokens,
                np.tile(prefixes.ids, times) + np.repeat(np.arange(times), per_time) * distinct,
                np.tile(prefixes.ends, times) + shifts * per_time,
            )
        return replace(
            self,
            arrival_s=np.tile(self.arrival_s, times) + shifts * period_s,
            prompt_tokens=np.tile(self.prompt_tokens, times),
            output_tokens=np.tile(self.output_tokens, times),
            prefixes=prefixes,
            label=None if self.label is None else np.tile(self.label, times),
            notes=(*self.notes, f"repeated {times} times"),
            measured=None,
        )


def drawn_blocks(count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`count` of `count` rows: blocks of √n in a row, each from a random start (the circular block bootstrap of Politis
    and Romano, 1992)."""
    block = max(1, round(math.sqrt(count)))
    starts = random.integers(count, size=(-(-count // block), 1))
    index: NDArray[np.int64] = ((starts + np.arange(block)) % count).ravel()[:count]
    return index


def _scaled(tokens: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    scaled: NDArray[np.int64] = np.maximum(1, np.rint(tokens * factor)).astype(np.int64)
    return scaled


class TraceBuilder:
    """Collects the rows of a file. Raises InputError that names the line and the column."""

    def __init__(self, name: str, block_tokens: int | None = None, most_early_s: float = 0.0) -> None:
        """`most_early_s`: rows may arrive this much before their predecessor; `build` then sorts them."""
        self._name = name
        self._block_tokens = block_tokens
        self._most_early_s = most_early_s
        self._latest_s = float("-inf")
        self._arrival_s: list[float] = []
        self._prompt: list[int] = []
        self._output: list[int] = []
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._labels: dict[tuple[str, str], int] = {}
        self._label: list[int] = []
        self._measured: list[tuple[float, float]] = []

    def add(
        self,
        line: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        ids: Sequence[int] = (),
        label: tuple[str, str] = (DEFAULT_CLASS, ""),
        measured_s: tuple[float, float] = (math.nan, math.nan),
    ) -> None:
        """`measured_s`: what the request took to its first token, and from there to its last."""
        if arrival_s < self._latest_s - self._most_early_s:
            raise self.wrong(
                line, "arrival", f"at least that of the line before ({self._latest_s:g} s): sort the trace", arrival_s
            )
        for column, tokens in (("prompt tokens", prompt_tokens), ("output tokens", output_tokens)):
            if not 1 <= tokens <= MAX_TOKENS:
                raise self.wrong(line, column, f"a number from 1 to {MAX_TOKENS}", tokens)
        if self._block_tokens is not None and len(ids) > -(-prompt_tokens // self._block_tokens):
            most = -(-prompt_tokens // self._block_tokens)
            raise self.wrong(
                line, "block hashes", f"at most {most} for {prompt_tokens} tokens in blocks of {self._block_tokens}",
                len(ids),
            )  # fmt: skip
        self._latest_s = max(self._latest_s, arrival_s)
        self._arrival_s.append(arrival_s)
        self._prompt.append(prompt_tokens)
        self._output.append(output_tokens)
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        self._label.append(self._labels.setdefault(label, len(self._labels)))
        self._measured.append(measured_s)

    def wrong(self, line: int, column: str, expected: str, got: object) -> InputError:
        shown = got if isinstance(got, int | float) else repr(got)[:60]
        return InputError(f"{self._name}, line {line}, {column}: expected {expected}, got {shown}", field=column)

    def build(self, notes: tuple[str, ...] = ()) -> TrafficTrace:
        if not self._arrival_s:
            raise InputError(f"{self._name}: expected at least one request, got none", field="trace")
        arrival_s = np.array(self._arrival_s)
        prefixes = None
        if self._block_tokens is not None:
            prefixes = PrefixBlocks(self._block_tokens, np.array(self._ids, np.int64), np.array(self._ends, np.int64))
        ttft_s, decode_s = np.array(self._measured).T
        measured = MeasuredTimes(ttft_s, decode_s, float(arrival_s.min()))
        trace = TrafficTrace(
            self._name,
            arrival_s - arrival_s.min(),
            np.array(self._prompt, np.int64),
            np.array(self._output, np.int64),
            prefixes,
            tuple(self._labels),
            None if len(self._labels) == 1 else np.array(self._label, np.int32),
            notes,
            None if np.isnan(ttft_s).all() else measured,
        )
        return in_order(trace) if self._most_early_s else trace


def in_order(trace: TrafficTrace) -> TrafficTrace:
    """Sorts by arrival; requests that arrive together keep their order."""
    order = np.argsort(trace.arrival_s, kind="stable")
    return trace if (order[1:] > order[:-1]).all() else trace.rows(order, trace.arrival_s[order])
