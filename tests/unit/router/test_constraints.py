"""Constraints as clients send them: what workers get, and what is refused, with the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.config.router import RouterSpec
from tandem.errors import InputError, UnsupportedField
from tandem.grammar.constraint import (
    MAX_DEPTH,
    Constraint,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
)
from tandem.grammar.structural_tag import Structure, structural_tag
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.testing.models import write_tiny_llama
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
LARK = 'start: "a" start | "b"'
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}
TAGGED = structural_tag([Structure("<a>", SCHEMA, "</a>")], ["<"], "")
PB_TAG = pb.StructuralTag(
    structures=[pb.StructuralTag.Structure(begin="<a>", schema=json.dumps(SCHEMA), end="</a>")], triggers=["<"]
)

SERVED: list[tuple[dict[str, Any], Constraint]] = [
    ({"response_format": FORMAT}, json_schema(SCHEMA, "")),
    ({"response_format": {"type": "json_object"}}, json_object("")),
    ({"guided_json": SCHEMA}, json_schema(SCHEMA, "")),
    ({"guided_json": json.dumps(SCHEMA)}, json_schema(SCHEMA, "")),
    ({"guided_regex": "[0-9]+"}, regex("[0-9]+", "")),
    ({"guided_choice": ["yes", "no"]}, choice(["yes", "no"], "")),
    ({"guided_grammar": LARK}, grammar(LARK, "")),
    ({"json_schema": json.dumps(SCHEMA)}, json_schema(SCHEMA, "")),
    ({"regex": "[0-9]+"}, regex("[0-9]+", "")),
    ({"ebnf": 'root ::= "a" | "b"'}, grammar('root ::= "a" | "b"', "")),
    ({"structured_outputs": {"json": SCHEMA}}, json_schema(SCHEMA, "")),
    ({"structured_outputs": {"regex": "[0-9]+"}}, regex("[0-9]+", "")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, choice(["yes", "no"], "")),
    ({"structured_outputs": {"grammar": LARK}}, grammar(LARK, "")),
    ({"structured_outputs": {"json_object": True}}, json_object("")),
    ({"response_format": TAG}, TAGGED),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, TAGGED),
]


def grammars(cluster: Cluster) -> set[str]:
    works = [work for stub in (cluster.prefill, cluster.decode) for work in stub.works.values()]
    return {work.sampling.grammar for work in works if work.sampling.HasField("grammar")}


@pytest.mark.parametrize(("fields", "expected"), SERVED, ids=lambda each: str(each)[:40])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_every_form_of_a_constraint_reaches_the_workers(
    cluster: Cluster, path: str, fields: dict[str, Any], expected: Constraint
) -> None:
    cluster.says("b")
    body = (CHAT if path.startswith("chat") else COMPLETION) | fields
    reply = await cluster.http.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    assert grammars(cluster) == {expected.grammar}


async def test_a_free_answer_has_no_grammar(cluster: Cluster) -> None:
    cluster.says("b")
    reply = await cluster.http.post("/v1/chat/completions", json=CHAT | {"response_format": {"type": "text"}})
    assert reply.status_code == 200
    assert grammars(cluster) == set()


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (pb.Constraint(json_schema=json.dumps(SCHEMA)), json_schema(SCHEMA, "")),
        (pb.Constraint(json_object=True), json_object("")),
        (pb.Constraint(regex="[0-9]+"), regex("[0-9]+", "")),
        (pb.Constraint(choice=pb.Choices(texts=["yes", "no"])), choice(["yes", "no"], "")),
        (pb.Constraint(grammar=LARK), grammar(LARK, "")),
        (pb.Constraint(structural_tag=PB_TAG), TAGGED),
    ],
    ids=["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"],
)
async def test_grpc_takes_each_kind(cluster: Cluster, constraint: pb.Constraint, expected: Constraint) -> None:
    cluster.says("b")
    async for _ in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi", constraint=constraint)):
        pass
    assert grammars(cluster) == {expected.grammar}


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (pb.Constraint(json_schema="{"), "constraint.json_schema"),
        (pb.Constraint(json_object=False), "constraint.json_object"),
        (pb.Constraint(regex="("), "constraint.regex"),
        (pb.Constraint(choice=pb.Choices()), "constraint.choice"),
        (pb.Constraint(grammar="start: missing"), "constraint.grammar"),
        (pb.Constraint(structural_tag=pb.StructuralTag()), "constraint.structural_tag.structures"),
        (
            pb.Constraint(
                structural_tag=pb.StructuralTag(structures=[pb.StructuralTag.Structure(begin="<", schema="{", end=">")])
            ),
            "constraint.structural_tag.structures.0.schema",
        ),
    ],
    ids=["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "schema"],
)
async def test_grpc_names_the_field_of_a_constraint_that_cannot_be_used(
    cluster: Cluster, constraint: pb.Constraint, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in cluster.inference.Generate(pb.GenerateRequest(prompt="Hi", constraint=constraint)):
            pass
    error = error_from_rpc(refused.value)
    assert isinstance(error, InputError)
    assert error.field == field


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def as_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (as_format("text"), "response_format.json_schema.schema", "an object or a boolean"),
        (as_format([1]), "response_format.json_schema.schema", "an object or a boolean"),
        (as_format(False), "response_format.json_schema.schema", "schema is false"),
        (as_format({"type": "wrong"}), "response_format.json_schema.schema", "wrong"),
        (as_format({"type": "integer", "minimum": 5, "maximum": 3}), "response_format.json_schema.schema", "minimum"),
        (as_format({"$ref": "#/missing"}), "response_format.json_schema.schema", "/missing"),
        (as_format({"$ref": "#"}), "response_format.json_schema.schema", ""),
        (as_format({"type": "object", "x-guidance": {"lenient": True}}), "response_format.json_schema.schema", "/x-gu"),
        (
            as_format({"properties": {"a/b": {"items": {"uniqueItems": True}}}}),
            "response_format.json_schema.schema",
            "/properties/a~1b/items/uniqueItems",
        ),
        (as_format({"properties": {"not": {"not": {}}}}), "response_format.json_schema.schema", "/properties/not/not"),
        (as_format(nested(MAX_DEPTH + 1)), "response_format.json_schema.schema", f"{MAX_DEPTH} levels"),
        (as_format({"enum": ["é" * 20_000]}), "response_format.json_schema.schema", "bytes"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "exactly with"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format.json_schema", ""),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "1 to 128"),
        ({"response_format": TAG | {"triggers": []}}, "response_format.triggers", "1 to 128"),
        ({"response_format": TAG | {"triggers": ["<b"]}}, "response_format.triggers.0", "leave it out"),
        ({"response_format": TAG | {"structures": [{"end": "x"}]}}, "response_format.structures.0.begin", "none"),
        (
            {"response_format": TAG | {"structures": [{"begin": "<a>", "end": ">", "schema": {"$ref": "#/x"}}]}},
            "response_format.structures.0.schema",
            "/x",
        ),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format", "send structures"),
        ({"response_format": TAG, "tools": [TOOL]}, "response_format", "structural tag"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "JSON"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG | {"structures": []})}},
            "structured_outputs.structural_tag.structures",
            "1 to 128",
        ),
        ({"response_format": FORMAT, "regex": "a"}, "response_format.json_schema.schema", "at most one"),
        ({"regex": "a", "ebnf": LARK}, "ebnf", "regex and ebnf"),
        ({"regex": "(a"}, "regex", "parse error"),
        ({"regex": ""}, "regex", ""),
        ({"guided_choice": []}, "guided_choice", "1 to 1024"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "an empty one"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "got 1025"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_grammar": "start: start"}, "guided_grammar", ""),
        ({"ebnf": "root ::= ("}, "ebnf", ""),
        ({"json_schema": "{"}, "json_schema", "as text"),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "got regex, choice"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unknown field"),
    ],
    ids=lambda each: str(each)[:40],
)
async def test_a_constraint_that_cannot_be_used_is_refused_by_field(
    cluster: Cluster, fields: dict[str, Any], param: str, said: str
) -> None:
    for _ in range(2):  # the second time from the results that are kept
        reply = await cluster.http.post("/v1/chat/completions", json=CHAT | fields)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param
        assert said in error["message"]
        assert len(error["message"]) < 600
    assert not [*cluster.prefill.works, *cluster.decode.works]


def test_an_unsupported_keyword_is_an_unsupported_field() -> None:
    located = json_schema({"items": {"uniqueItems": True}}, "f").located('Unimplemented keys: ["uniqueItems"]')
    assert isinstance(located, UnsupportedField)


async def test_a_worker_that_knows_no_grammars_gets_none(cluster: Cluster) -> None:
    cluster.says("b")
    for worker in cluster.app.dispatcher.fleet.workers():
        worker.link.takes_grammars = False
    reply = await cluster.http.post("/v1/completions", json=COMPLETION | {"regex": "b"})
    assert reply.status_code == 503
    assert not [*cluster.prefill.works, *cluster.decode.works]
    assert (await cluster.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_model_whose_answers_nothing_ends_takes_no_constraint(tmp_path: Path, spec: RouterSpec) -> None:
    cluster = Cluster(write_tiny_llama(tmp_path / "endless", max_positions=2048), spec, 512)
    await cluster.start()
    try:
        await cluster.list_workers(cluster.prefill, cluster.decode)
        reply = await cluster.http.post("/v1/chat/completions", json=CHAT | {"response_format": FORMAT})
        assert reply.status_code == 400
        said = reply.json()["error"]
        assert said["param"] == "response_format.json_schema.schema"
        assert "config.json: eos_token_id: constrained answers need a token that ends them" in said["message"]
        assert (await cluster.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    finally:
        await cluster.stop()
