"""The fields that constrain an answer: OpenAI's `response_format`, and those that clients of vLLM and SGLang send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Json, Tag

from router.edge.strict_model import Items, StrictModel, type_of, unsupported
from router.texts.json_limits import check_texts
from tandem.errors import InputError
from tandem.grammar.constraint import Constraint, choice, grammar, json_object, json_schema, json_schema_text, regex
from tandem.grammar.structural_tag import MAX_STRUCTURES, Structure, structural_tag

Text = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(StrictModel):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Any = Field(None, alias="schema", description="JSON Schema, draft 2020-12. Absent: any JSON object.")
    strict: bool | None = Field(None, description="No effect: every answer satisfies its schema.")


class StructureFields(StrictModel):
    begin: str
    schema_: Any = Field(None, alias="schema", description="JSON Schema, draft 2020-12. Absent: any JSON object.")
    end: str


class StructuralTag(StrictModel):
    """As in vLLM and SGLang: free text, in which a trigger begins one of the structures."""

    type: Literal["structural_tag"]
    structures: Annotated[Items[StructureFields], Field(max_length=MAX_STRUCTURES)] | None = None
    triggers: Annotated[Items[str], Field(max_length=MAX_STRUCTURES)] | None = None
    format: object = None  # a later form of theirs

    def constraint(self, field: str) -> Constraint:
        """Raises InputError, UnsupportedField."""
        if self.format is not None:
            raise unsupported(f"{field}.format", "a structural tag in this form", "send structures and triggers")
        structures = [
            Structure(each.begin, {"type": "object"} if each.schema_ is None else each.schema_, each.end)
            for each in self.structures or ()
        ]
        return structural_tag(structures, self.triggers or (), field)


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self, field: str) -> Constraint | None:
        """Raises InputError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InputError(
                f"{field}.json_schema: expected exactly with type 'json_schema'", field=f"{field}.json_schema"
            )
        if self.json_schema is None:
            return None if self.type == "text" else json_object(field)
        if self.json_schema.schema_ is None:
            return json_object(f"{field}.json_schema")
        return json_schema(self.json_schema.schema_, f"{field}.json_schema.schema")


AnyFormat = Annotated[
    Annotated[ResponseFormat, Tag("Format")] | Annotated[StructuralTag, Tag("StructuralTag")],
    Discriminator(lambda given: "StructuralTag" if type_of(given) == "structural_tag" else "Format"),
]


def _within_limits(text: object) -> object:
    if isinstance(text, str):
        check_texts([("structured_outputs.structural_tag", text)])
    return text


class StructuredOutputs(StrictModel):
    """As in vLLM: exactly one of its fields."""

    json_: Any = Field(None, alias="json")
    regex: Text | None = None
    choice: Items[str] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Json[StructuralTag], BeforeValidator(_within_limits)] | None = Field(
        None, description="The text of a `response_format` of this type."
    )


class ConstraintFields(StrictModel):
    """At most one of them, and of `response_format`."""

    structured_outputs: StructuredOutputs | None = Field(None, description="As in vLLM.")
    guided_json: Any = Field(None, description="A JSON Schema, also as text; as in vLLM.")
    guided_regex: Text | None = Field(None, description="As in vLLM.")
    guided_choice: Items[str] | None = Field(None, description="As in vLLM.")
    guided_grammar: Text | None = Field(None, description="Lark or GBNF; as in vLLM.")
    json_schema: Any = Field(None, description="A JSON Schema as text; as in SGLang.")
    regex: Text | None = Field(None, description="As in SGLang.")
    ebnf: Text | None = Field(None, description="Lark or GBNF; as in SGLang.")

    def _constraint(self, response_format: AnyFormat | None) -> Constraint | None:
        """Raises InputError."""
        outer = {
            "guided_json": (self.guided_json, _schema),
            "guided_regex": (self.guided_regex, regex),
            "guided_choice": (self.guided_choice, choice),
            "guided_grammar": (self.guided_grammar, grammar),
            "json_schema": (self.json_schema, _schema),
            "regex": (self.regex, regex),
            "ebnf": (self.ebnf, grammar),
        }
        found = [_made(name, value, make) for name, (value, make) in outer.items() if value is not None]
        if (inner := self.structured_outputs) is not None:
            found.append(_of_structured_outputs(inner))
        if response_format is not None and (formatted := response_format.constraint("response_format")) is not None:
            found.append(formatted)
        if len(found) > 1:
            fields = " and ".join(each.field for each in found)
            raise InputError(f"{fields}: expected at most one of them; leave the others out", field=found[1].field)
        return found[0] if found else None


def _of_structured_outputs(given: StructuredOutputs) -> Constraint:
    fields = {
        "json": (given.json_, _schema),
        "regex": (given.regex, regex),
        "choice": (given.choice, choice),
        "grammar": (given.grammar, grammar),
        "json_object": (given.json_object or None, lambda _, field: json_object(field)),
        "structural_tag": (given.structural_tag, lambda tag, field: tag.constraint(field)),
    }
    set_ = {name: each for name, each in fields.items() if each[0] is not None}
    if len(set_) != 1:
        raise InputError(
            f"structured_outputs: expected exactly one of {', '.join(fields)}, got {', '.join(set_) or 'none'}",
            field="structured_outputs",
        )
    ((name, (value, make)),) = set_.items()
    return _made(f"structured_outputs.{name}", value, make)


def _made(field: str, value: Any, make: Callable[[Any, str], Constraint]) -> Constraint:
    return make(value, field)


def _schema(given: object, field: str) -> Constraint:
    """A JSON Schema, or its text."""
    return json_schema_text(given, field) if isinstance(given, str) else json_schema(given, field)
