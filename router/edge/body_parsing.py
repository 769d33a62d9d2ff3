"""The models of requests from bodies of JSON, for every API. What a body has wrong is told with the field's name."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from router.edge.openai.field_errors import field_error
from router.texts.json_limits import check_body
from tandem.errors import InputError
from tandem.request import MAX_LOGIT_BIAS

MAX_KEYS = 2 * MAX_LOGIT_BIAS  # per JSON object
MAX_NAME_CHARS = 80  # of a client's field name in an error

# What Pydantic adds to the path of a fault in a union: names with capitals, which clients' keys have not.
_MODELS = ("TextPart", "TextContent", "DocumentText", "NamedTool", "NamedCustomTool", "AllowedToolsChoice")
_TAGS = ("Function", "Custom", "Grammar", "AnyText", "Format", "StructuralTag", "Text", "Image")
_BRANCHES = frozenset(["str", "int", "float", *_MODELS, *_TAGS])

Request = TypeVar("Request", bound=BaseModel)


def parse_body(kind: type[Request], body: bytes) -> Request:
    """Raises InputError with the first fault and its field."""
    check_body(body)
    try:
        value = from_json(body)
    except ValueError as error:
        raise InputError(f"body: expected JSON in UTF-8: {error}") from None
    if body.count(b":") > MAX_KEYS:
        _check_keys(value)
    return parse_fields(kind, value)


def _check_keys(value: object) -> None:
    """Limits the keys of each object: Pydantic notes every unknown key, which would cost more than parsing them."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if len(each) > MAX_KEYS:
                raise InputError(f"body: expected objects of at most {MAX_KEYS} keys, got one of {len(each)}")
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(item for item in each if isinstance(item, dict | list))


def parse_fields(kind: type[Request], fields: object) -> Request:
    """As `parse_body`, for parsed JSON."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _input_error(error) from None


def _input_error(error: ValidationError) -> InputError:
    faults = error.errors(include_url=False)
    # The client meant the branch of a union that validated deepest.
    same = [each for each in faults if each["loc"][:1] == faults[0]["loc"][:1]]
    depth = max(len(_path(each)) for each in same)
    deepest = [each for each in same if len(_path(each)) == depth]
    field = ".".join(part[:MAX_NAME_CHARS] for part in _path(deepest[0])) or None
    return field_error(field, deepest)


def _path(fault: ErrorDetails) -> list[str]:
    places = fault["loc"]
    key = len(places) - 1 if fault["type"] == "extra_forbidden" else None  # the client's, whatever it is called
    return [str(part) for number, part in enumerate(places) if number == key or not _is_union_branch(part)]


def _is_union_branch(part: int | str) -> bool:
    """Pydantic adds the branch of a union to the location, which is no key of the client's JSON."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)
