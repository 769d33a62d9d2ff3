"""The OpenAPI document of the HTTP edge, generated from the types that parse requests and those that encode answers."""

from __future__ import annotations

import re
from functools import cache
from itertools import chain
from typing import Any, get_args

import msgspec
from pydantic.json_schema import models_json_schema

from router.auth.access import KEY_HEADER, KEY_HEADER_ROUTES, http_access
from router.auth.principal import AccessLevel
from router.edge.anthropic.answer_schema import MessageEvent, MessageObject, MessagesError, TokenCount
from router.edge.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from router.edge.http_bodies import AnyBody
from router.edge.openai.answer_schema import (
    AnswerStruct,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionUsage,
    DetokenizeAnswer,
    ErrorBody,
    ModelCard,
    ModelList,
    StatusAnswer,
    TokenizeAnswer,
    TokenizerInfo,
)
from router.edge.openai.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    RankedList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from router.edge.openai.request_schema import ChatCompletionRequest, CompletionRequest
from router.edge.openai.responses_answer_schema import ResponseEvent, ResponseObject
from router.edge.openai.responses_schema import ResponsesRequest
from router.edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from router.idempotency.keyed_answers import HEADER
from router.request_terms import PRIORITY, TENANT, TIMEOUT
from tandem.errors import WIRE, ErrorCode
from tandem.request import (
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
)
from tandem.version import tandem_version

Schema = dict[str, Any]

_REQUESTS = get_args(AnyBody)
# The names that answers have in the document.
_ANSWERS: dict[str, type[AnswerStruct]] = {
    "ChatCompletion": ChatCompletion,
    "ChatCompletionChunk": ChatCompletionChunk,
    "Completion": Completion,
    "Embeddings": EmbeddingList,
    "Error": ErrorBody,
    "Info": TokenizerInfo,
    "Message": MessageObject,
    "MessagesError": MessagesError,
    "Model": ModelCard,
    "Models": ModelList,
    "Ranking": RankedList,
    "Response": ResponseObject,
    "Scores": ScoreList,
    "Status": StatusAnswer,
    "Text": DetokenizeAnswer,
    "TokenCount": TokenCount,
    "Tokens": TokenizeAnswer,
    "Usage": CompletionUsage,
}
_EVENTS = {"ResponseEvent": get_args(ResponseEvent), "MessageEvent": get_args(MessageEvent)}
_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answers() -> Schema:
    """The schemas of all answers and of their parts, by name."""
    names = {kind.__name__: name for name, kind in _ANSWERS.items()}
    kinds = dict.fromkeys([*_ANSWERS.values(), *chain(*_EVENTS.values())])
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    text = re.sub(
        r'(?<="#/components/schemas/)\w+', lambda name: names.get(name[0], name[0]), msgspec.json.encode(found).decode()
    )
    schemas = {names.get(kind, kind): each for kind, each in msgspec.json.decode(text).items()}
    schemas = {name: _all_required(each) | {"title": name} for name, each in schemas.items()}
    return schemas | {
        union: {"anyOf": [_ref(names.get(each.__name__, each.__name__)) for each in events]}
        for union, events in _EVENTS.items()
    }


def _all_required(schema: Schema) -> Schema:
    """Marks fields with a default as required, as answers always contain them. In msgspec's schema, a field that may be
    UNSET has no default."""
    if "properties" not in schema:
        return schema
    fields = schema["properties"].items()
    required = [name for name, each in fields if "default" in each or name in schema["required"]]
    properties = {name: {key: value for key, value in each.items() if key != "default"} for name, each in fields}
    return schema | {"properties": properties, "required": required}


# Limits that are checked for all edges in one place, and so are not in the types that parse requests.
_PENALTY: Schema = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
_LIMITS: dict[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": MAX_REPETITION_PENALTY},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": _COUNT},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    },
}


def _limited(request: Schema) -> Schema:
    """A request's schema with `_LIMITS` applied to every type of value except null."""
    shown = dict(request.get("properties", {}))
    for name in shown.keys() & _LIMITS.keys():
        kinds = [kind if kind["type"] == "null" else kind | _LIMITS[name] for kind in shown[name]["anyOf"]]
        shown[name] = shown[name] | {"anyOf": kinds}
    return request | ({"properties": shown} if shown else {})


def _content(kind: str, schema: Schema) -> Schema:
    return {kind: {"schema": schema}}


def _json(name: str) -> Schema:
    return _content("application/json", _ref(name))


def _reply(text: str, content: Schema) -> Schema:
    return {"description": text, "headers": {"x-request-id": {"schema": _STRING}}, "content": content}


def _errors(error: str) -> Schema:
    statuses = sorted({WIRE[code].http_status for code in ErrorCode} - {499})
    retry = {"retry-after": {"schema": _STRING, "description": "Seconds after which a retry may succeed."}}
    reply = _reply("The request was refused or failed.", _json(error))
    return {str(status): reply | {"headers": reply["headers"] | retry} for status in statuses}


def _parameters(*, computes: bool) -> list[Schema]:
    names = ["x-request-id", *((PRIORITY, TENANT, TIMEOUT, HEADER) if computes else ())]
    return [{"name": name, "in": "header", "required": False, "schema": _STRING} for name in names]


def _post(
    summary: str,
    request: type,
    answer: str,
    events: str | None = None,
    error: str = "Error",
    *,
    computes: bool = False,
) -> Schema:
    """`events`: of a stream. `computes`: on workers, also without a stream."""
    content, said = _json(answer), "The answer."
    if events is not None:
        said = "The answer, or its events with stream=true."
        content |= _content("text/event-stream", _ref(events))
    body = {"required": True, "content": _json(request.__name__)}
    return {
        "post": {
            "summary": summary,
            "operationId": request.__name__.removesuffix("Request"),
            "parameters": _parameters(computes=computes or events is not None),
            "requestBody": body,
            "responses": {"200": _reply(said, content), **_errors(error)},
        }
    }


def _get(summary: str, operation: str, content: Schema, **more: Schema) -> Schema:
    return {
        "get": {
            "summary": summary,
            "operationId": operation,
            "responses": {"200": _reply("The answer.", content), **more},
        }
    }


# A router without security.auth requires no key.
_SCHEMES: Schema = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key or a JWT, if the router requires one."},
    "header": {"type": "apiKey", "in": "header", "name": KEY_HEADER, "description": "As Anthropic's clients send it."},
    "admin": {"type": "http", "scheme": "basic", "description": "The password is an API key with the admin flag."},
}
_SECURITY: dict[AccessLevel, list[Schema]] = {
    AccessLevel.PUBLIC: [],
    AccessLevel.CALLER: [{"key": []}],
    AccessLevel.ADMIN: [{"key": []}, {"admin": []}],
}


def _with_security(paths: Schema) -> Schema:
    """Adds the access that router.auth.access requires, and the answers to a missing or insufficient key."""
    refused = _reply("The key is missing, invalid or not allowed to do this.", _json("Error"))
    for path, methods in paths.items():
        access = http_access(path.replace("{name}", "{name:path}"))
        for operation in methods.values():
            operation["security"] = _SECURITY[access] + ([{"header": []}] if path in KEY_HEADER_ROUTES else [])
            if access is not AccessLevel.PUBLIC:
                operation["responses"].setdefault("401", refused)
                operation["responses"].setdefault("403", refused)
    return paths


@cache
def openapi_document() -> Schema:
    """OpenAPI 3.1; the same object each time."""
    _, requests = models_json_schema(
        [(each, "validation") for each in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    missing = _reply("There is no such model.", _json("Error"))
    model = _get("One model", "Model", _json("Model"), **{"404": missing})
    model["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    info = _get("What a remote client needs to use the tokenizer", "TokenizerInfo", _json("Info"))
    info["get"]["parameters"] = [{"name": "model", "in": "query", "required": False, "schema": _STRING}]
    info["get"]["responses"]["404"] = missing
    status = _json("Status")
    not_ready = _reply("Requests cannot be served now.", status)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": tandem_version()},
        "paths": _with_security(
            {
                "/v1/chat/completions": _post(
                    "Answers a chat", ChatCompletionRequest, "ChatCompletion", "ChatCompletionChunk"
                ),
                "/v1/completions": _post(
                    "Continues one or several texts", CompletionRequest, "Completion", "Completion"
                ),
                "/v1/responses": _post("Answers text with text", ResponsesRequest, "Response", "ResponseEvent"),
                "/v1/messages": _post(
                    "Answers a chat, as Anthropic's API does",
                    MessagesRequest,
                    "Message",
                    "MessageEvent",
                    "MessagesError",
                ),
                "/v1/messages/count_tokens": _post(
                    "Counts the tokens of a prompt", CountTokensRequest, "TokenCount", error="MessagesError"
                ),
                "/v1/embeddings": _post(
                    "Embeddings of one or several texts", EmbeddingRequest, "Embeddings", computes=True
                ),
                "/v1/score": _post("How alike pairs of texts are", ScoreRequest, "Scores", computes=True),
                "/v1/rerank": _post(
                    "Orders documents by how alike they are to a query", RerankRequest, "Ranking", computes=True
                ),
                "/tokenize": _post("Token ids of a text or a chat", TokenizeRequest, "Tokens"),
                "/detokenize": _post("Text of token ids", DetokenizeRequest, "Text"),
                "/tokenizer_info": info,
                "/v1/models": _get("The models that are served", "Models", _json("Models")),
                "/v1/models/{name}": model,
                "/health": _get("Whether the process runs", "Health", status),
                "/ready": _get("Whether requests can be served", "Ready", status, **{"503": not_ready}),
                "/metrics": _get("Prometheus metrics", "Metrics", _content("text/plain", _STRING)),
                "/openapi.json": _get("This document", "OpenApi", _content("application/json", {"type": "object"})),
            }
        ),
        "components": {
            "schemas": {name: _limited(each) for name, each in requests["$defs"].items()} | _answers(),
            "securitySchemes": _SCHEMES,
        },
    }
