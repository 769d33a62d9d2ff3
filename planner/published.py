"""Cost models from published step times: Splitwise's table of measurements, and DistServe's fits."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planner.cost import CostModel
from planner.fitted import DecodePoint, FittedCostModel, PiecewisePlane, Plane, PrefillPoint, fit, read_json
from planner.shapes import LinkShape
from tandem.errors import ConfigError

_SPLITWISE_NUMBERS = ("tensor_parallel", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time")


def read_splitwise(path: Path, model: str, hardware: str, link: LinkShape) -> dict[int, CostModel]:
    """Cost models by TP width from a table in Splitwise's format (milliseconds). Raises ConfigError."""
    points: dict[int, tuple[list[PrefillPoint], list[DecodePoint]]] = {}
    names: set[tuple[str, str]] = set()
    for line, row in _rows(path):
        names.add((str(row["model"]), str(row["hardware"])))
        if (row["model"], row["hardware"]) == (model, hardware):
            *counts, prompt_ms, token_ms = (_positive(path, line, row, name) for name in _SPLITWISE_NUMBERS)
            tp, prompt, batch, answer = map(int, counts)
            prefills, decodes = points.setdefault(tp, ([], []))
            prefills.append(PrefillPoint(prompt, 0, prompt_ms / 1000, batch))
            decodes.append(DecodePoint(batch, batch * (prompt + answer // 2), token_ms / 1000))
    if not points:
        known = ", ".join(f"{one}/{two}" for one, two in sorted(names))
        raise ConfigError(f"{path.name}: expected one of {known}, got {model}/{hardware}", field="--cost")
    return {tp: fit(*found, link, f"{path.name} {model}/{hardware}") for tp, found in sorted(points.items())}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Numbered lines of a table in Splitwise's format. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = ("model", "hardware", *_SPLITWISE_NUMBERS)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path.name}, line 1: expected a column {missing[0]}", field=missing[0])
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise ConfigError(f"--cost: {path}: {error.strerror}", field="--cost") from None
    except (csv.Error, UnicodeDecodeError):
        raise ConfigError(f"--cost: {path}: expected a CSV table", field="--cost") from None


def _positive(path: Path, line: int, row: Mapping[str, str | None], column: str) -> float:
    """Raises ConfigError; a short row has None."""
    text = row[column]
    try:
        value = float(text or "")
    except ValueError:
        value = np.nan
    if not 0 < value < np.inf:
        got = "nothing" if text is None else repr(text)
        raise ConfigError(f"{path.name}, line {line}, {column}: expected a number above 0, got {got}", field=column)
    return value


def read_distserve(path: Path, model: str, link: LinkShape) -> dict[int, CostModel]:
    """Cost models by TP width from DistServe's published fits, which include no measurements, so `fit_error` is None.
    Raises ConfigError."""
    tables = read_json(path)
    if model not in tables:
        raise ConfigError(f"{path.name}: expected one of {', '.join(tables)}, got {model!r}", field="--cost")
    try:
        return {int(tp): _distserve(entry, link, path.name) for tp, entry in tables[model].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name}: expected DistServe's fields: {error}", field="--cost") from None


def _distserve(entry: dict[str, Any], link: LinkShape, name: str) -> FittedCostModel:
    keys = ("prefill", "decoding_smallbs", "decoding_largebs")
    prefill, small, large = (Plane(*(float(each) / 1000 for each in entry[key])) for key in keys)
    threshold = int(entry["decoding_large_small_bs_threshold"])
    return FittedCostModel(PiecewisePlane((prefill,)), PiecewisePlane((small, large), (threshold,)), link, None, name)
