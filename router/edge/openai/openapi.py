"""The OpenAPI document of the HTTP edge: requests from the types that parse them, answers as the formats write them."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from router.auth.access import http_access
from router.auth.principal import Access
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
_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_ANY: Schema = {}


def _object(**properties: Schema) -> Schema:
    """Every property is always there; further ones may come with later versions."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _with_optional(schema: Schema, **properties: Schema) -> Schema:
    return schema | {"properties": schema["properties"] | properties}


_REASON = _or_null({"type": "string", "enum": ["stop", "length"]})
_TOKEN = _object(token=_STRING, logprob=_or_null(_NUMBER), bytes=_or_null(_list(_COUNT)))
_CHAT_TOKEN = _with_optional(_TOKEN, top_logprobs=_list(_TOKEN))
_CHAT_LOGPROBS = _or_null(_object(content=_list(_CHAT_TOKEN), refusal={"type": "null"}))
_COMPLETION_LOGPROBS = _object(
    tokens=_list(_STRING),
    token_logprobs=_list(_or_null(_NUMBER)),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _or_null(_NUMBER)})),
    text_offset=_list(_COUNT),
)
_PART = _object(type=_const("output_text"), text=_STRING, annotations=_list(_ANY), logprobs=_list(_CHAT_TOKEN))
_OUTPUT = _object(id=_STRING, type=_const("message"), role=_const("assistant"), status=_STRING, content=_list(_PART))

_ANSWERS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_STRING, type=_STRING, param=_or_null(_STRING), code=_or_null(_STRING))),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "ChatCompletion": _object(
        id=_STRING,
        object=_const("chat.completion"),
        created=_COUNT,
        model=_STRING,
        choices=_list(
            _object(
                index=_COUNT,
                message=_object(role=_const("assistant"), content=_STRING, refusal={"type": "null"}),
                logprobs=_CHAT_LOGPROBS,
                finish_reason=_REASON,
            )
        ),
        usage=_ref("Usage"),
    ),
    "ChatCompletionChunk": _with_optional(
        _object(
            id=_STRING,
            object=_const("chat.completion.chunk"),
            created=_COUNT,
            model=_STRING,
            choices=_list(_object(index=_COUNT, delta=_ANY, logprobs=_CHAT_LOGPROBS, finish_reason=_REASON)),
        ),
        usage=_or_null(_ref("Usage")),
    ),
    "Completion": _with_optional(
        _object(
            id=_STRING,
            object=_const("text_completion"),
            created=_COUNT,
            model=_STRING,
            choices=_list(
                _object(index=_COUNT, text=_STRING, logprobs=_or_null(_COMPLETION_LOGPROBS), finish_reason=_REASON)
            ),
        ),
        usage=_or_null(_ref("Usage")),
    ),
    "Response": _object(
        id=_STRING,
        object=_const("response"),
        created_at=_COUNT,
        model=_STRING,
        status={"type": "string", "enum": ["in_progress", "completed", "incomplete", "failed"]},
        incomplete_details=_or_null(_object(reason=_STRING)),
        error=_or_null(_object(code=_STRING, message=_STRING)),
        output=_list(_OUTPUT),
        usage=_or_null(
            _object(
                input_tokens=_COUNT,
                input_tokens_details=_object(cached_tokens=_COUNT),
                output_tokens=_COUNT,
                output_tokens_details=_object(reasoning_tokens=_COUNT),
                total_tokens=_COUNT,
            )
        ),
    ),
    "ResponseEvent": _object(type=_STRING, sequence_number=_COUNT),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    "Text": _object(prompt=_STRING),
    "Info": _object(
        eos_token=_or_null(_STRING),
        bos_token=_or_null(_STRING),
        pad_token=_or_null(_STRING),
        chat_template=_or_null(_STRING),
        vocab_size=_COUNT,
        max_model_len=_COUNT,
    ),
    "Model": _object(id=_STRING, object=_const("model"), created=_COUNT, owned_by=_STRING, max_model_len=_COUNT),
    "Models": _object(object=_const("list"), data=_list(_ref("Model"))),
    "Status": _object(status=_STRING),
}


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
            "schemas": {name: _limited(each) for name, each in requests["$defs"].items()} | _ANSWERS,
            "securitySchemes": _SCHEMES,
        },
    }
