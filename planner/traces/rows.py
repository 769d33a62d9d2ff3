"""The rows of a file that make up a trace: those that the user chose. Notes say which, and of how many models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.errors import ConfigError, InputError

Row = TypeVar("Row", bound=Mapping[str, object])
MODELS = ("model", "model_name", "engine", "deployment")
"""Columns that may name the model that a request was for, in lower case."""
_SHOWN = 5  # values in a note or an error
_LONGEST = 80  # characters of a value that is counted: a column may hold the prompts


@dataclass(frozen=True, slots=True)
class Condition:
    """A row has one of `values` in `column`."""

    column: str
    values: tuple[str, ...]

    def holds(self, row: Mapping[str, object]) -> bool:
        return _text(row.get(self.column)) in self.values

    def __str__(self) -> str:
        return f"{self.column}={' or '.join(self.values)}"


def parse_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """`COLUMN=VALUE` each. Of one column any of the values will do. Raises ConfigError."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        column, equals, value = (part.strip() for part in text.partition("="))
        if not column or not equals:
            raise ConfigError(
                f"--where: expected COLUMN=VALUE, such as model=llama-3-70b, got {text[:60]!r}", field="--where"
            )
        found[column] = (*found.get(column, ()), value)
    return tuple(Condition(column, values) for column, values in found.items())


class RowChoice:
    """Passes the rows of one file that meet every condition, and counts what it sees."""

    def __init__(self, file: str, conditions: Sequence[Condition], models: Sequence[str] = MODELS) -> None:
        """`models`: columns that may name a row's model; the first that a row has does."""
        self._file, self._conditions, self._model_columns = file, conditions, models
        self._columns: dict[str, None] = {}
        self._values: list[Counter[str]] = [Counter() for _ in conditions]  # in rows that met the conditions before
        self._models: dict[str, Counter[str]] = {name: Counter() for name in models}
        self._rows = self._chosen = 0

    def of(self, rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
        """Raises InputError at the end if there were rows but none was chosen."""
        for line, row in rows:
            self._rows += 1
            if self._holds(row):
                self._chosen += 1
                column = next((name for name in self._model_columns if name in row), None)
                if column is not None:
                    self._models[column][_text(row[column])[:_LONGEST]] += 1
                yield line, row
        if self._rows and not self._chosen:
            raise self._nothing_chosen()

    def notes(self) -> Iterator[str]:
        if self._conditions:
            chosen = " and ".join(map(str, self._conditions))
            yield f"rows with {chosen}: {self._chosen} of {self._rows}"
        column, models = next(((name, found) for name, found in self._models.items() if found), ("", Counter[str]()))
        named = len([model for model in models if model])
        if named > 1:
            shares = _most(models + Counter({"": self._chosen - models.total()}), self._chosen)
            yield (
                f"{column} has {named} values ({shares}): results are for one model, so choose its rows with "
                f"--where {column}=NAME"
            )

    def _holds(self, row: Mapping[str, object]) -> bool:
        for condition, values in zip(self._conditions, self._values, strict=True):
            self._columns.update(dict.fromkeys(row))
            values[_text(row.get(condition.column))[:_LONGEST]] += 1
            if not condition.holds(row):
                return False
        return True

    def _nothing_chosen(self) -> InputError:
        at = next(number for number, values in enumerate(self._values) if not self._is_met(number))
        column, values = self._conditions[at].column, self._values[at]
        if column not in self._columns:
            known = ", ".join(self._columns)[:300]
            return InputError(f"--where: expected a column of {self._file} ({known}), got {column!r}", field="--where")
        before = " and ".join(map(str, self._conditions[:at]))
        among = f" in rows with {before}" if before else ""
        wanted = " or ".join(map(repr, self._conditions[at].values))
        return InputError(
            f"--where: expected a value that {column} has{among} ({_most(values, values.total())}), got {wanted}",
            field="--where",
        )

    def _is_met(self, number: int) -> bool:
        return any(self._values[number][value[:_LONGEST]] for value in self._conditions[number].values)


def model_columns(header: Sequence[str]) -> tuple[str, ...]:
    """Of a header in upper or lower case."""
    return tuple(column for name in MODELS for column in header if column.lower() == name)


def _most(values: Counter[str], total: int) -> str:
    """`a 71.3%, b 20.1% and 3 more`."""
    shown = ", ".join(f"{value or '(none)'} {count / total:.1%}" for value, count in values.most_common(_SHOWN))
    return shown + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")


def _text(value: object) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value)
