"""Says what a type expected, in one line and in OpenAI's codes, of what Pydantic found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from router.edge.strict_model import FieldError
from tandem.errors import InputError
from tandem.text.words import plural

MAX_SHOWN_CHARS = 40
# By the type of the fault: what was expected.
_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "finite_number": "a finite number",
}
_VALUES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "literal_error": lambda context: f"{context['expected']}",
    "greater_than_equal": lambda context: f"at least {context['ge']}",
    "greater_than": lambda context: f"more than {context['gt']}",
    "less_than_equal": lambda context: f"at most {context['le']}",
    "less_than": lambda context: f"less than {context['lt']}",
    "string_too_short": lambda context: f"at least {plural(context['min_length'], 'character')}",
    "string_too_long": lambda context: f"at most {plural(context['max_length'], 'character')}",
    "string_pattern_mismatch": lambda context: f"a text of the pattern {context['pattern']}",
    "too_short": lambda context: f"at least {plural(context['min_length'], 'item')}",
    "too_long": lambda context: f"at most {plural(context['max_length'], 'item')}",
}


def field_error(field: str | None, faults: Sequence[ErrorDetails]) -> InputError:
    """`faults`: of one field, one for each branch of its union."""
    where, first = field or "body", faults[0]
    expected = list(dict.fromkeys(filter(None, map(_expected, faults))))
    text, code = f"{first['msg'][:1].lower()}{first['msg'][1:]}", "invalid_value"
    if first["type"] == "extra_forbidden":
        text, code = "unknown field; leave it out", "unknown_parameter"
    elif first["type"] == "missing":
        text, code = "expected a value, got none", "missing_required_parameter"
    elif expected:
        text = f"expected {' or '.join(expected)}, got {_got(first['input'])}"
        code = "invalid_type" if all(each["type"] in _TYPES for each in faults) else code
    return FieldError(f"{where}: {text}", field=field, openai_code=code)


def _expected(fault: ErrorDetails) -> str | None:
    if fault["type"] in _TYPES:
        return _TYPES[fault["type"]]
    made = _VALUES.get(fault["type"])
    return None if made is None else made(fault.get("ctx", {}))


def _got(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN_CHARS]) + ("…" if len(value) > MAX_SHOWN_CHARS else "")
    if isinstance(value, int | float):
        return str(value)[:MAX_SHOWN_CHARS]
    return f"a list of {len(value)}" if isinstance(value, list) else "an object"
