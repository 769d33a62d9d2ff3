"""Types of JSON Schema in words, for the tables that scripts write."""

from __future__ import annotations

import json
from typing import Any


def type_of(schema: dict[str, Any]) -> str:
    """The type and its limits; `section` where the schema names no type."""
    if "anyOf" in schema:
        return " or ".join(type_of(each) for each in schema["anyOf"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" if value else '`""`' for value in schema["enum"])
    named = schema.get("type", "section")
    return (" or ".join(named) if isinstance(named, list) else named) + limits(schema)


def limits(schema: dict[str, Any]) -> str:
    words = {"minimum": "≥ ", "maximum": "≤ ", "exclusiveMinimum": "> ", "exclusiveMaximum": "< "}
    found = [
        f"{word}{schema[key]:,g}" if schema[key] < 1e6 else f"{word}{schema[key]:,}"
        for key, word in words.items()
        if key in schema
    ]
    if "pattern" in schema:
        found.append(f"`{schema['pattern']}`".replace("|", "\\|"))
    return f", {', '.join(found)}" if found else ""
