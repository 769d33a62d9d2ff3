"""The OpenAPI document of the HTTP edge: requests from the types that parse them, answers as the formats write them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import msgspec
from pydantic.json_schema import models_json_schema

from router.auth.access import http_access
from router.auth.principal import Access
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
    ResponseEvent,
    ResponseObject,
    StatusAnswer,
    TokenizeAnswer,
    TokenizerInfo,
)
from router.edge.openai.responses_schema import ResponsesRequest
from router.edge.openai.schema import ChatCompletionRequest, CompletionRequest
from router.edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from router.terms import PRIORITY, TENANT, TIMEOUT
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

_REQUESTS = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
# The names that answers have in the document.
_ANSWERS: dict[str, type[AnswerStruct]] = {
    "ChatCompletion": ChatCompletion,
    "ChatCompletionChunk": ChatCompletionChunk,
    "Completion": Completion,
    "Error": ErrorBody,
    "Info": TokenizerInfo,
    "Model": ModelCard,
    "Models": ModelList,
    "Response": ResponseObject,
    "Status": StatusAnswer,
    "Text": DetokenizeAnswer,
    "Tokens": TokenizeAnswer,
    "Usage": CompletionUsage,
}
_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answers() -> Schema:
    """The schemas of all answers, and of what is in them, by name."""
    events = get_args(ResponseEvent)
    names = {kind.__name__: name for name, kind in _ANSWERS.items()}
    _, found = msgspec.json.schema_components([*_ANSWERS.values(), *events], ref_template="#/components/schemas/{name}")
    text = re.sub(
        r'(?<="#/components/schemas/)\w+', lambda name: names.get(name[0], name[0]), msgspec.json.encode(found).decode()
    )
    schemas = {names.get(kind, kind): each for kind, each in msgspec.json.decode(text).items()}
    schemas = {name: _all_required(each) | {"title": name} for name, each in schemas.items()}
    return schemas | {"ResponseEvent": {"anyOf": [_ref(each.__name__) for each in events]}}


def _all_required(schema: Schema) -> Schema:
    """Answers always contain their fields with a default, so these are required too. A field that may be UNSET has no
    default here."""
    if "properties" not in schema:
        return schema
    fields = schema["properties"].items()
    required = [name for name, each in fields if "default" in each or name in schema["required"]]
    properties = {name: {key: value for key, value in each.items() if key != "default"} for name, each in fields}
    return schema | {"properties": properties, "required": required}


# What is checked for all edges alike, and so not by the types that parse them.
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
    """A request's schema with the limits of `_LIMITS` on every kind of value but null."""
    shown = dict(request.get("properties", {}))
    for name in shown.keys() & _LIMITS.keys():
        kinds = [kind if kind["type"] == "null" else kind | _LIMITS[name] for kind in shown[name]["anyOf"]]
        shown[name] = shown[name] | {"anyOf": kinds}
    return request | ({"properties": shown} if shown else {})


def _content(kind: str, schema: Schema) -> Schema:
    return {kind: {"schema": schema}}


def _reply(text: str, content: Schema) -> Schema:
    return {"description": text, "headers": {"x-request-id": {"schema": _STRING}}, "content": content}


def _errors() -> Schema:
    statuses = sorted({WIRE[code].http_status for code in ErrorCode} - {499})
    retry = {"retry-after": {"schema": _STRING, "description": "Seconds; where a retry may succeed."}}
    reply = _reply("Refused or failed.", _content("application/json", _ref("Error")))
    return {str(status): reply | {"headers": reply["headers"] | retry} for status in statuses}


def _parameters(*, generates: bool) -> list[Schema]:
    names = ["x-request-id", *((PRIORITY, TENANT, TIMEOUT) if generates else ())]
    return [{"name": name, "in": "header", "required": False, "schema": _STRING} for name in names]


def _post(summary: str, request: type, answer: str, events: str | None = None) -> Schema:
    content = _content("application/json", _ref(answer))
    if events is not None:
        content |= _content("text/event-stream", _ref(events))
    body = {"required": True, "content": _content("application/json", _ref(request.__name__))}
    return {
        "post": {
            "summary": summary,
            "operationId": request.__name__.removesuffix("Request"),
            "parameters": _parameters(generates=events is not None),
            "requestBody": body,
            "responses": {"200": _reply("The answer; with stream=true its events.", content), **_errors()},
        }
    }


def _get(summary: str, operation: str, content: Schema, **more: Schema) -> Schema:
    return {
        "get": {"summary": summary, "operationId": operation, "responses": {"200": _reply("Now.", content), **more}}
    }


# Routers without security.auth ask nobody.
_SCHEMES: Schema = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key or a JWT, where the router asks for one."},
    "admin": {"type": "http", "scheme": "basic", "description": "The password is an API key with the admin flag."},
}
_SECURITY: dict[Access, list[Schema]] = {
    Access.PUBLIC: [],
    Access.CALLER: [{"key": []}],
    Access.ADMIN: [{"key": []}, {"admin": []}],
}


def _with_security(paths: Schema) -> Schema:
    """What the table of router.auth.access says, and the answer to who has no key."""
    refused = _reply("Refused: no good key.", _content("application/json", _ref("Error")))
    for path, methods in paths.items():
        access = http_access(path.replace("{name}", "{name:path}"))
        for operation in methods.values():
            operation["security"] = _SECURITY[access]
            if access is not Access.PUBLIC:
                operation["responses"].setdefault("401", refused)
                operation["responses"].setdefault("403", refused)
    return paths


@cache
def openapi_document() -> Schema:
    """OpenAPI 3.1; the same object each time."""
    _, requests = models_json_schema(
        [(each, "validation") for each in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    missing = _reply("There is none.", _content("application/json", _ref("Error")))
    model = _get("One model", "Model", _content("application/json", _ref("Model")), **{"404": missing})
    model["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    info = _get("What a tokenizer used from afar needs", "TokenizerInfo", _content("application/json", _ref("Info")))
    info["get"]["parameters"] = [{"name": "model", "in": "query", "required": False, "schema": _STRING}]
    info["get"]["responses"]["404"] = missing
    status = _content("application/json", _ref("Status"))
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
                "/tokenize": _post("Token ids of a text or a chat", TokenizeRequest, "Tokens"),
                "/detokenize": _post("Text of token ids", DetokenizeRequest, "Text"),
                "/tokenizer_info": info,
                "/v1/models": _get("The models there are", "Models", _content("application/json", _ref("Models"))),
                "/v1/models/{name}": model,
                "/health": _get("The process is alive", "Health", status),
                "/ready": _get("A request could be served", "Ready", status, **{"503": _reply("Not now.", status)}),
                "/metrics": _get("Prometheus metrics", "Metrics", _content("text/plain", _STRING)),
                "/openapi.json": _get("This document", "OpenApi", _content("application/json", {"type": "object"})),
            }
        ),
        "components": {
            "schemas": {name: _limited(each) for name, each in requests["$defs"].items()} | _answers(),
            "securitySchemes": _SCHEMES,
        },
    }
