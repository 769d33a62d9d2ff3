"""The types that a schema lets a property have, whatever the schema refers to."""

from __future__ import annotations

from typing import Any

import pytest

from router.model_formats.shapes.typed import types_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 2.5, None]}, {"string", "integer", "number", "null"}),
        ({"$ref": "#/$defs/n"}, {"number"}),
        (
            {"anyOf": [{"$ref": "#/$defs/n"}, {"oneOf": [{"const": True}, {"type": "array"}]}]},
            {"number", "boolean", "array"},
        ),
        ({"$ref": "#/$defs/all"}, {"number"}),  # it refers to itself a thousand times
    ],
)
def test_each_schema_is_looked_at_once(schema: dict[str, Any], types: set[str]) -> None:
    again = [{"$ref": "#/$defs/all"}] * 1000
    root = {
        "properties": {"a": schema},
        "$defs": {"n": {"type": "number"}, "all": {"anyOf": [*again, {"$ref": "#/$defs/n"}]}},
    }
    assert types_of(root, "a") == types
