"""Free text with tags: after a trigger, the text is that of a tag until the tag's end. As in vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, free_text, inline_json, json_schema

MAX_STRUCTURES = 128


@dataclass(frozen=True, slots=True)
class Structure:
    """`begin` and `end`: the texts around JSON that satisfies `schema`."""

    begin: str
    schema: object
    end: str


def structural_tag(structures: Sequence[Structure], triggers: Sequence[str], field: str) -> Constraint:
    """Text is free until a trigger, which a structure that begins with it must follow. Raises InputError."""
    for name, given in (("structures", structures), ("triggers", triggers)):
        if not 0 < len(given) <= MAX_STRUCTURES:
            where = f"{field}.{name}"
            raise InputError(f"{where}: expected 1 to {MAX_STRUCTURES}, got {len(given)}", field=where)
    for where, reason in _faults(structures, triggers, field):
        raise InputError(f"{where}: {reason}", field=where)
    parts = [json_schema(each.schema, f"{field}.structures.{at}.schema") for at, each in enumerate(structures)]
    lines = ["%llguidance {}", r"TEXT: /(.|\n)*/"]
    for number, trigger in enumerate(triggers):
        rests = [
            f"{json.dumps(each.begin.removeprefix(trigger))} {inline_json(each.schema)} {json.dumps(each.end)}"
            for each in structures
            if each.begin.startswith(trigger)
        ]
        lines += [
            f"until{number}[lazy]: TEXT {json.dumps(trigger)}",
            f"tag{number}: until{number} ({' | '.join(rests)})",
        ]
    lines.append("REST: TEXT & ~(TEXT ({}) TEXT)".format(" | ".join(map(json.dumps, triggers))))
    lines.append("start: ({})* REST".format(" | ".join(f"tag{number}" for number in range(len(triggers)))))
    return free_text("\n".join(lines), parts, field)


def _faults(structures: Sequence[Structure], triggers: Sequence[str], field: str) -> Iterator[tuple[str, str]]:
    """The field of each, and what is wrong."""
    for at, trigger in enumerate(triggers):
        where = f"{field}.triggers.{at}"
        if not trigger:
            yield where, "expected a text of at least one character, got an empty one"
        elif other := next((each for to, each in enumerate(triggers) if to != at and each and each in trigger), None):
            yield where, f"expected triggers of which none contains another, got {trigger[:40]!r} and {other[:40]!r}"
        elif not any(each.begin.startswith(trigger) for each in structures):
            yield where, f"expected the beginning of a structure's begin, got {trigger[:40]!r}; leave it out"
    for at, each in enumerate(structures):
        where = f"{field}.structures.{at}"
        if not each.end:
            yield f"{where}.end", "expected a text of at least one character, got an empty one"
        elif not any(map(each.begin.startswith, triggers)):
            yield f"{where}.begin", f"expected a text that begins with a trigger, got {each.begin[:40]!r}"
        elif any(each.begin == other.begin for other in structures[:at]):
            yield f"{where}.begin", f"expected texts that differ, got {each.begin[:40]!r} twice"
