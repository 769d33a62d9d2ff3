"""What the models of requests share: no unknown field, no conversion, no list without a limit."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tandem.errors import InputError

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
