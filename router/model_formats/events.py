"""What is found in an answer's text: text, reasoning and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """`index`: of the call in the answer, from 0. `id`: as the model wrote it, if it wrote one before the arguments.
    `is_custom`: it carries an input instead of arguments."""

    index: int
    name: str
    id: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallInput:
    """A further piece of the text that a custom tool is called with."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments are whole: one JSON object. A call without it was cut off, or its text stopped being one."""

    index: int


Event = Text | Reasoning | CallStarted | CallArguments | CallInput | CallEnded
