"""Traces with one JSON object per line: Mooncake's, and Tandem's own request log.

Mooncake: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.
Request log: `arrival_s`, `prompt_tokens`, `output_tokens`; optionally `block_tokens` with `block_hashes` (salted;
hexadecimal or numbers), `class`, `tenant`, and what the request took, `ttft_s` with `decode_s`. Both may name a model.
Other columns are refused, to catch misspellings, unless the user chooses rows by them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.traces.rows import MODELS, Condition, RowChoice
from planner.traces.trace import DEFAULT_CLASS, TraceBuilder, TrafficTrace
from tandem.errors import InputError

MOONCAKE_BLOCK_TOKENS = 512
LOG_EARLY_S = 3600.0  # the log is in the order in which requests ended
_MAX_ID = 2**62
_MOONCAKE = {"timestamp", "input_length", "output_length", "hash_ids"}
_MEASURED = ("ttft_s", "decode_s")
_LOG = {"arrival_s", "prompt_tokens", "output_tokens", "block_tokens", "block_hashes", "class", "tenant", *_MEASURED}


def read_mooncake(path: Path, where: Sequence[Condition] = ()) -> TrafficTrace:
    """Raises InputError naming line, column and what was expected."""
    builder = TraceBuilder(path.name, MOONCAKE_BLOCK_TOKENS)
    choice = RowChoice(path.name, where)
    for line, row in choice.of(_rows(path, builder, _allowed(_MOONCAKE, where), _MOONCAKE)):
        arrival_ms = _number(builder, line, row, "timestamp")
        prompt = _count(builder, line, row, "input_length")
        output = _count(builder, line, row, "output_length")
        ids = _ids(builder, line, row, "hash_ids")
        builder.add(line, arrival_ms / 1000, prompt, output, ids)
    return builder.build(tuple(choice.notes()))


def read_request_log(path: Path, where: Sequence[Condition] = ()) -> TrafficTrace:
    """Raises InputError naming line, column and what was expected."""
    block_tokens = _first_block_tokens(path, where)
    builder = TraceBuilder(path.name, block_tokens, most_early_s=LOG_EARLY_S)
    choice = RowChoice(path.name, where)
    needed = {"arrival_s", "prompt_tokens", "output_tokens"}
    for line, row in choice.of(_rows(path, builder, _allowed(_LOG, where), needed)):
        ids = _ids(builder, line, row, "block_hashes") if "block_hashes" in row else []
        if ids and row.get("block_tokens") != block_tokens:
            raise builder.wrong(line, "block_tokens", f"{block_tokens}, as in the first row", row.get("block_tokens"))
        label = (_text(builder, line, row, "class"), _text(builder, line, row, "tenant"))
        builder.add(
            line,
            _number(builder, line, row, "arrival_s"),
            _count(builder, line, row, "prompt_tokens"),
            _count(builder, line, row, "output_tokens"),
            ids,
            label,
            _measured(builder, line, row),
        )
    return builder.build(tuple(choice.notes()))


def log_row(
    arrival_s: float,
    prompt_tokens: int,
    output_tokens: int,
    *,
    blocks: tuple[int, Sequence[int]] | None,
    times_s: Mapping[str, float],
    label: tuple[str, str],
) -> str:
    """A line for `read_request_log`. `blocks`: tokens of one, and the hashes. `label`: class and tenant."""
    row: dict[str, Any] = {
        "arrival_s": round(arrival_s, 6),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    if blocks is not None:
        row["block_tokens"], row["block_hashes"] = blocks[0], list(blocks[1])
    row |= {name: round(seconds, 6) for name, seconds in times_s.items()}
    row |= {key: name for key, name in zip(("class", "tenant"), label, strict=True) if name}
    return json.dumps(row) + "\n"


def write_request_log(trace: TrafficTrace, path: Path) -> None:
    """Writes the format of `read_request_log`."""
    with path.open("w", encoding="utf-8") as file:
        for index in range(len(trace)):
            measured, prefixes = trace.measured, trace.prefixes
            has_times = measured is not None and not math.isnan(measured.ttft_s[index])
            row = log_row(
                float(trace.arrival_s[index]),
                int(trace.prompt_tokens[index]),
                int(trace.output_tokens[index]),
                blocks=None if prefixes is None else (prefixes.block_tokens, prefixes.of(index).tolist()),
                times_s={name: float(getattr(measured, name)[index]) for name in _MEASURED} if has_times else {},
                label=trace.label_of(index),
            )
            file.write(row)


def keys_of_first_line(path: Path) -> frozenset[str]:
    """Raises InputError when the file does not begin with a JSON object."""
    return frozenset(_object(path.name, 1, _first_line(path)))


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline(1 << 24)


def _allowed(known: set[str], where: Sequence[Condition]) -> set[str]:
    return {*known, *MODELS, *(each.column for each in where)}


def _first_block_tokens(path: Path, where: Sequence[Condition]) -> int | None:
    """Of the first row that is chosen."""
    line, row = next(
        (found for found in _objects(path) if all(each.holds(found[1]) for each in where)), (1, dict[str, Any]())
    )
    if "block_hashes" not in row:
        return None
    value = row.get("block_tokens")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 16:
        raise InputError(
            f"{path.name}, line {line}, block_tokens: expected the tokens of each block (1 to 65536), got {value!r}",
            field="block_tokens",
        )
    return value


def _rows(path: Path, builder: TraceBuilder, known: set[str], needed: set[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in _objects(path):
        if missing := sorted(needed - row.keys()):
            raise builder.wrong(line, missing[0], "a value", "none")
        if unknown := sorted(row.keys() - known):
            raise builder.wrong(line, unknown[0], f"only the columns {', '.join(sorted(known))}", unknown[0])
        yield line, row


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                raise InputError(f"{path.name}, line {line}: expected a JSON object, got an empty line", field="row")
            yield line, _object(path.name, line, text)


def _object(name: str, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError(f"{name}, line {line}: expected a JSON object, got {text.strip()[:60]!r}", field="row")
    return row


def _number(builder: TraceBuilder, line: int, row: dict[str, Any], column: str) -> float:
    value = row[column]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise builder.wrong(line, column, "a number", value)
    return float(value)


def _measured(builder: TraceBuilder, line: int, row: dict[str, Any]) -> tuple[float, float]:
    """NaN if the row has no times."""
    if not any(name in row for name in _MEASURED):
        return math.nan, math.nan
    if missing := [name for name in _MEASURED if name not in row]:
        raise builder.wrong(line, missing[0], "a value, because the row has the other time", "none")
    found = [_number(builder, line, row, name) for name in _MEASURED]
    for name, seconds in zip(_MEASURED, found, strict=True):
        if seconds < 0:
            raise builder.wrong(line, name, "at least 0 s", seconds)
    return found[0], found[1]


def _count(builder: TraceBuilder, line: int, row: dict[str, Any], column: str) -> int:
    value = row[column]
    if not isinstance(value, int) or isinstance(value, bool):
        raise builder.wrong(line, column, "a whole number of tokens", value)
    return value


def _text(builder: TraceBuilder, line: int, row: dict[str, Any], column: str) -> str:
    value = row.get(column, DEFAULT_CLASS)
    if not isinstance(value, str) or len(value) > 128:
        raise builder.wrong(line, column, "a name of at most 128 characters", value)
    return value


def _ids(builder: TraceBuilder, line: int, row: dict[str, Any], column: str) -> list[int]:
    values = row[column]
    if not isinstance(values, list):
        raise builder.wrong(line, column, "a list", values)
    return [_id(builder, line, column, value) for value in values]


def _id(builder: TraceBuilder, line: int, column: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_ID:
        return value
    if isinstance(value, str) and 8 <= len(value) <= 64:
        try:
            return int(value, 16) % _MAX_ID
        except ValueError:
            pass  # the error is raised below
    raise builder.wrong(line, column, f"hexadecimal hashes, or numbers from 0 to {_MAX_ID}", value)
