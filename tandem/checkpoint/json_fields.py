"""Typed reads from a checkpoint's JSON files. Each error names the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem.errors import CheckpointError

MAX_JSON_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class JsonFields:
    """`within` is the path from the top of the file to this object, for errors: "rope_scaling."."""

    path: Path
    values: Mapping[str, Any]
    within: str = ""

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        return cls(path, read_json_object(path))

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def part(self, field: str) -> JsonFields:
        """A nested object."""
        value = self.values.get(field)
        if not isinstance(value, dict):
            raise self.wrong(field, "an object", value)
        return JsonFields(self.path, value, f"{self.within}{field}.")

    def wrong(self, field: str, expected: str, got: object) -> CheckpointError:
        name = self.within + field
        return CheckpointError(f"{self.path}: {name}: expected {expected}, got {got!r}", field=name)

    def positive_int(self, field: str, *, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.wrong(field, "a positive integer", value)
        return value

    def optional_int(self, field: str) -> int | None:
        return self.positive_int(field) if self.has(field) else None

    def positive_float(self, field: str, *, default: float | None = None) -> float:
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(field, "a positive number", value)
        return float(value)

    def optional_float(self, field: str) -> float | None:
        return self.positive_float(field) if self.has(field) else None

    def positive_floats(self, field: str, length: int) -> tuple[float, ...]:
        value = self.values.get(field)
        good = isinstance(value, list) and len(value) == length
        if not good or any(isinstance(each, bool) or not isinstance(each, int | float) for each in value or ()):
            raise self.wrong(field, f"a list of {length} numbers", value)
        if any(not 0 < each < math.inf for each in value or ()):
            raise self.wrong(field, "positive numbers", value)
        return tuple(float(each) for each in value or ())

    def boolean(self, field: str, *, default: bool = False) -> bool:
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, "true or false", value)
        return default if value is None else value

    def token_ids(self, field: str) -> frozenset[int]:
        """One id, a list of ids, or none."""
        return frozenset(self.counts(field, "a token id or a list of them"))

    def counts(self, field: str, expected: str = "an integer of at least 0 or a list of them") -> tuple[int, ...]:
        """One integer of at least 0, a list of them, or none."""
        value = self.values.get(field)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in found):
            raise self.wrong(field, expected, value)
        return tuple(found)


def read_json_object(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON file as a dict. Raises CheckpointError naming the file."""
    try:
        value = json.loads(read_small_file(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got: {error}", field="model") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(value).__name__}", field="model")
    return value


def read_small_file(path: Path) -> bytes:
    """The file's bytes, at most MAX_JSON_BYTES. Raises CheckpointError naming the file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: expected at most {MAX_JSON_BYTES} bytes, got a file of {size}", field="model"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected this file in the checkpoint, found none", field="model") from error
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, got: {error.strerror}", field="model") from error
