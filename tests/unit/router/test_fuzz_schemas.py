"""Random JSON Schemas, tools and other constraints at the chat edge: it serves them, or names the field."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.router.conftest import Cluster

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
EXAMPLES = 5000 if os.environ.get("TANDEM_SOAK") else 150
NAMES = ["a", "b", "é/~", ""]
PATTERNS = ["^a", "[a-z]+$", "(?=a)b", "[[a]&&b]", "(", "\\d{2,}", "a\\b", ""]
FORMATS = ["date", "uuid", "email", "regex", "int32", ""]
REFERENCES = ["#", "#/$defs/a", "#/properties/a", "#/missing", "#a", "https://example.com/a", ""]
TYPES = ["object", "array", "string", "integer", "number", "boolean", "null", "any"]

names, patterns = st.sampled_from(NAMES), st.sampled_from(PATTERNS)
counts = st.sampled_from([0, 1, 2, 3, 2.0, -1, 10**9, 2**70, 0.5, True, "1"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=4,
)
leaves: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), max_size=3) | values,
    "enum": st.lists(values, max_size=3) | values,
    "const": values,
    "pattern": patterns | values,
    "format": st.sampled_from(FORMATS) | values,
    "$ref": st.sampled_from(REFERENCES) | values,
    "required": st.lists(names, max_size=3) | values,
    "uniqueItems": st.booleans(),
    "exclusiveMinimum": counts,
    "exclusiveMaximum": counts,
    "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2), max_size=2),
    "x-guidance": values,
    "title": values,
    **{f"{bound}{what}": counts for bound in ("min", "max") for what in ("Length", "Items", "Properties", "imum")},
    "multipleOf": counts,
}


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    one, many, named = inner, st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)
    keywords = {
        **dict.fromkeys(("items", "additionalProperties", "not", "if", "contains", "propertyNames"), one | values),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), many | values),
        **dict.fromkeys(("properties", "$defs"), named | values),
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        **leaves,
    }
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({each: keywords[each] for each in chosen})
    )


schemas = st.recursive(
    st.booleans() | st.fixed_dictionaries({"type": st.sampled_from(TYPES[:-1])}), nested, max_leaves=6
)
any_schemas = schemas | values
texts = schemas.map(json.dumps) | st.text(max_size=5)
grammars = st.sampled_from(
    ['start: "b"', "start: start", "start: ", 'root ::= "b"', "root ::= (", 'start: %json {"a": 1}']
)
constraints: dict[str, st.SearchStrategy[Any]] = {
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["json_schema", "json_object", "text", "xml"])},
        optional={"json_schema": st.fixed_dictionaries({"name": st.just("n")}, optional={"schema": any_schemas})},
    ),
    "guided_json": any_schemas | texts,
    "json_schema": any_schemas | texts,
    "guided_regex": patterns,
    "regex": patterns,
    "guided_choice": st.lists(st.text(max_size=3), max_size=3),
    "guided_grammar": grammars,
    "ebnf": grammars,
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={"json": any_schemas | texts, "regex": patterns, "choice": st.lists(st.text(max_size=3), max_size=3)},
    ),
}
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "é", ""])},
    optional={"parameters": st.fixed_dictionaries({"type": st.just("object")}) | any_schemas, "strict": st.booleans()},
)
tools = st.fixed_dictionaries(
    {"tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=3)},
    optional={
        "tool_choice": st.sampled_from(["none", "auto", "required", "all"])
        | st.sampled_from(["a", "c"]).map(lambda name: {"type": "function", "function": {"name": name}}),
        "parallel_tool_calls": st.booleans(),
    },
)
bodies = st.builds(
    lambda constraint, tools: constraint | tools,
    st.sampled_from(sorted(constraints)).flatmap(lambda name: st.fixed_dictionaries({name: constraints[name]}))
    | st.just({}),
    tools | st.just({}),
)


def generated() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    @given(bodies)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(body: dict[str, Any]) -> None:
        found.append(body)

    one()
    return found


@pytest.fixture
def max_model_tokens() -> int:
    return 2048  # a token is a character here, and tools are described


@pytest.mark.soak
async def test_random_schemas_and_tools_are_served_or_refused_by_field(cluster: Cluster) -> None:
    cluster.says("b")
    seen = Counter[int]()
    for body in generated():
        reply = await cluster.http.post("/v1/chat/completions", json={**CHAT, **body})
        seen[reply.status_code] += 1
        assert reply.status_code in (200, 400), (body, reply.text)
        if reply.status_code == 400:
            error = reply.json()["error"]
            assert error["param"].split(".")[0].split("[")[0] in (*body, "messages"), (body, error)
    print(dict(seen))
    assert min(seen[200], seen[400]) > EXAMPLES / 10
