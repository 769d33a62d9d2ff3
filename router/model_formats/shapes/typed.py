"""Values that a model writes as bare text, as the JSON that the tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.model_formats.grammar import Schema

_MAX_REFERENCES = 8
_STRING = frozenset(["string"])
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write too


def types_of(tool: Schema, key: str) -> frozenset[str]:
    """The JSON types that a property may have. One that the schema does not name is a string."""
    properties = tool.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return _STRING
    return _types(properties[key], tool, _MAX_REFERENCES) or frozenset(
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


def _types(schema: object, root: Schema, left: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not left:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_target(reference, root), root, left - 1)
    if isinstance(named := schema.get("type"), str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(_type, values))
    found: frozenset[str] = frozenset()
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            found = found.union(*(_types(each, root, left - 1) for each in branches))
    return found


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
