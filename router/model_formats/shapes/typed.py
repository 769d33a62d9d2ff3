"""Values that a model writes as bare text, as the JSON that the tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.model_formats.grammar import Schema

_STRING = frozenset(["string"])
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write too


def types_of(tool: Schema, key: str) -> frozenset[str]:
    """The JSON types that a property may have. One that the schema does not name is a string."""
    properties = tool.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return _STRING
    return _types(properties[key], tool) or frozenset(
        ["string", "integer", "number", "boolean", "null", "array", "object"]
    )


def json_of(text: str, types: frozenset[str]) -> str:
    """JSON of one of `types` if `text` is such JSON; else `text` as a JSON string."""
    written = text.strip()
    written = _WORDS.get(written, written)
    try:
        found = _type(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        found = ""
    if found != "string" and (found in types or (found == "integer" and "number" in types)):
        return written
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object, root: Schema) -> frozenset[str]:
    """Looks at each schema once."""
    found: set[str] = set()
    pending, seen = [schema], set[str]()
    while pending:
        each = pending.pop()
        if not isinstance(each, Mapping):
            continue
        values = [each["const"]] if "const" in each else each.get("enum")
        named = each.get("type")
        if isinstance(reference := each.get("$ref"), str):
            if reference not in seen:
                seen.add(reference)
                pending.append(_target(reference, root))
        elif isinstance(named, str | list):
            found.update([named] if isinstance(named, str) else (one for one in named if isinstance(one, str)))
        elif isinstance(values, list):
            found.update(map(_type, values))
        else:
            for keyword in ("anyOf", "oneOf", "allOf"):
                branches = each.get(keyword)
                pending += branches if isinstance(branches, list) else []
    return frozenset(found)


def _target(reference: str, root: Schema) -> object:
    target: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def _type(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are no JSON
