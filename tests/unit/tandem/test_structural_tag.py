"""Free text with tags: what such an answer may be, and which tags are refused."""

from __future__ import annotations

import re
import string
from random import Random
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.grammar.structural_tag import MAX_STRUCTURES, Structure, structural_tag
from tandem.testing.schema_suite import Grammars

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBER = {"type": "integer"}
STRUCTURES = [
    Structure("<fn=weather>", CITY, "</fn>"),
    Structure("<fn=add>", NUMBER, "</fn>"),
    Structure("[calc ", NUMBER, "]\n"),
]
TRIGGERS = ["<fn=", "[calc"]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It rains.\n<b>Hard</b> <fn [cal",
        '<fn=weather>{"city": "Oslo <fn=add>"}</fn>',
        'See: <fn=add>12</fn><fn=add>-3</fn> and [calc 4]\n so <fn=weather>{"city": "a"}</fn>.',
        "[[calc 1]\n",
        "<<fn=add>1</fn>",
    ],
)
def test_text_is_free_and_tags_are_whole(grammars: Grammars, text: str) -> None:
    assert grammars.accepts(grammars.of(structural_tag(STRUCTURES, TRIGGERS, "f")), text)


@pytest.mark.parametrize(
    "text",
    [
        "<fn=",
        "So <fn=other>1</fn>",
        '<fn=add>{"city": "a"}</fn>',
        "<fn=add>1",
        "<fn=add>1</fn",
        "<fn=weather>{}</fn>",
        "[calc 1]",
        "x [calc1]\n",
        "[calc <fn=add>1</fn>]\n",
        "[calc 1]\n<fn=",
    ],
)
def test_after_a_trigger_nothing_but_its_tags_may_follow(grammars: Grammars, text: str) -> None:
    assert not grammars.accepts(grammars.of(structural_tag(STRUCTURES, TRIGGERS, "f")), text)


def test_random_answers_hold_only_whole_tags(grammars: Grammars) -> None:
    letters = [*string.ascii_letters]  # so many that random answers have some
    grammar = grammars.of(structural_tag([Structure(each, NUMBER, "!") for each in letters], letters, "f"))
    found = [text for seed in range(100) if (text := grammars.answer(grammar, Random(seed))) is not None]
    assert any(set(text) & set(letters) for text in found)
    assert all(re.fullmatch(r"([^a-zA-Z]|[a-zA-Z]-?[0-9]+!)*", text) for text in found)


@pytest.mark.parametrize(
    ("structures", "triggers", "field", "reason"),
    [
        ([], ["<"], "f.structures", "1 to 128, got 0"),
        (STRUCTURES, [], "f.triggers", "1 to 128, got 0"),
        ([Structure(f"<{at}>", {}, ">") for at in range(MAX_STRUCTURES + 1)], ["<"], "f.structures", "got 129"),
        ([Structure("<a>", NUMBER, "")], ["<"], "f.structures.0.end", "an empty one"),
        ([Structure("", NUMBER, ">")], ["<"], "f.triggers.0", "leave it out"),
        ([Structure("<a>", NUMBER, ">"), Structure("", NUMBER, ">")], ["<"], "f.structures.1.begin", "with a trigger"),
        ([Structure("a", NUMBER, ">")], [""], "f.triggers.0", "an empty one"),
        ([Structure("<a>", NUMBER, ">"), Structure("(", NUMBER, ")")], ["<"], "f.structures.1.begin", "got '('"),
        ([Structure("<a>", NUMBER, ">"), Structure("<a>", CITY, ">")], ["<"], "f.structures.1.begin", "'<a>' twice"),
        ([Structure("<a>", NUMBER, ">")], ["<", "<a"], "f.triggers.1", "contains another"),
        ([Structure("<a>", NUMBER, ">")], ["<", "<"], "f.triggers.0", "contains another"),
        ([Structure("<a>", "x", ">")], ["<"], "f.structures.0.schema", "an object or a boolean"),
        ([Structure("<a>", {"uniqueItems": True}, ">")], ["<"], "f.structures.0.schema", "/uniqueItems"),
        ([Structure("<", NUMBER, ">"), Structure("<b>", {"$ref": "#/x"}, ">")], ["<"], "f.structures.1.schema", "/x"),
        ([Structure("<a>", False, ">")], ["<"], "f.structures.0.schema", "false"),
        ([Structure("<" + "a" * 70_000, NUMBER, ">")], ["<"], "f", "bytes"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_tags_that_cannot_be_used_are_refused_by_field(
    grammars: Grammars, structures: list[Structure], triggers: list[str], field: str, reason: str
) -> None:
    with pytest.raises(InputError) as refused:
        grammars.of(structural_tag(structures, triggers, field="f"))
    assert refused.value.field == field
    assert reason in refused.value.message


def test_a_schema_may_be_a_boolean(grammars: Grammars) -> None:
    schema: Any = True
    grammar = grammars.of(structural_tag([Structure("<", schema, ">")], ["<"], "f"))
    assert grammars.accepts(grammar, '<[1, "a"]>')
