"""What the models of requests share: no unknown field, no conversion, no list without a limit, and how a known field is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tandem.errors import InputError, UnsupportedField

Item = TypeVar("Item")
# Pydantic stops at the first fault: a list of a million wrong items costs no more than one of them.
Items = Annotated[list[Item], Field(fail_fast=True)]


def at_most(most: int, field: str) -> BeforeValidator:
    """Limits the length of a list before its items are validated."""

    def check(given: object) -> object:
        if isinstance(given, list) and len(given) > most:
            raise InputError(f"{field}: expected at most {most}, got {len(given)}", field=field)
        return given

    return BeforeValidator(check)


class FieldError(InputError):
    """A fault that a type of a field found. `openai_code`: its name in OpenAI's API."""

    def __init__(self, message: str, *, field: str | None = None, openai_code: str = "invalid_value") -> None:
        super().__init__(message, field=field)
        self.openai_code = openai_code


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def type_of(given: object) -> object:
    """What chooses one of a union of models."""
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", None)


# Per known but unsupported field: whether a value changes nothing.
Neutral = dict[str, Callable[[object], bool]]


def equals(*neutral: object) -> Callable[[object], bool]:
    return lambda value: value in neutral


def is_empty(value: object) -> bool:
    return value in ([], {}, "")


def never(value: object) -> bool:
    return False


def refuse_unsupported(request: BaseModel, neutral: Neutral, where: str = "") -> None:
    """Raises UnsupportedField for the first field whose value would change the answer. `where`: before its name."""
    for field, is_neutral in neutral.items():
        value = getattr(request, field)
        if value is not None and not is_neutral(value):
            raise unsupported(where + field)


def unsupported(field: str, what: str = "this value", remedy: str = "leave the field out") -> UnsupportedField:
    return UnsupportedField(f"{field}: {what} is not supported yet; {remedy}", field=field)
