"""The access that each HTTP route and gRPC method requires.

What is not listed requires an admin key. A test checks that everything is listed.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.auth.principal import AccessLevel

HTTP_ACCESS: Mapping[str, AccessLevel] = {
    "/v1/chat/completions": AccessLevel.CALLER,
    "/v1/completions": AccessLevel.CALLER,
    "/v1/responses": AccessLevel.CALLER,
    "/v1/messages": AccessLevel.CALLER,
    "/v1/messages/count_tokens": AccessLevel.CALLER,
    "/v1/embeddings": AccessLevel.CALLER,
    "/v1/score": AccessLevel.CALLER,
    "/v1/rerank": AccessLevel.CALLER,
    "/tokenize": AccessLevel.CALLER,
    "/detokenize": AccessLevel.CALLER,
    "/tokenizer_info": AccessLevel.CALLER,
    "/v1/models": AccessLevel.CALLER,
    "/v1/models/{name:path}": AccessLevel.CALLER,
    "/openapi.json": AccessLevel.CALLER,
    "/health": AccessLevel.PUBLIC,
    "/ready": AccessLevel.PUBLIC,
    "/metrics": AccessLevel.ADMIN,
    "/": AccessLevel.PUBLIC,  # leads to the dashboard
    "/dashboard": AccessLevel.PUBLIC,  # the page holds no data
    "/dashboard/": AccessLevel.PUBLIC,
    "/dashboard/static/{name}": AccessLevel.PUBLIC,
    "/dashboard/api/v1/snapshot": AccessLevel.ADMIN,
    "/dashboard/api/v1/requests/{request_id}": AccessLevel.ADMIN,
}

# Anthropic's clients may send the key as `x-api-key` instead of `authorization`.
KEY_HEADER = "x-api-key"
KEY_HEADER_ROUTES = frozenset(["/v1/messages", "/v1/messages/count_tokens"])

_INFERENCE = ("Generate", "Tokenize", "ListModels", "GetServerInfo")
_OIP = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelInfer",
    "ModelStreamInfer",
)  # fmt: skip
GRPC_ACCESS: Mapping[str, AccessLevel] = {
    **{f"/tandem.v1.Inference/{name}": AccessLevel.CALLER for name in _INFERENCE},
    **{f"/inference.GRPCInferenceService/{name}": AccessLevel.CALLER for name in _OIP},
    "/vllm.Inference/Generate": AccessLevel.CALLER,
    "/vllm.Inference/GenerateStream": AccessLevel.CALLER,
    "/inference.GRPCInferenceService/ModelStatistics": AccessLevel.ADMIN,  # of all tenants
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": AccessLevel.CALLER,
    "/grpc.health.v1.Health/Check": AccessLevel.PUBLIC,
    "/grpc.health.v1.Health/List": AccessLevel.PUBLIC,
    "/grpc.health.v1.Health/Watch": AccessLevel.PUBLIC,
    "/tandem.v1.Traces/GetTrace": AccessLevel.CONTROLLER,
    "/tandem.v1.Traces/ListTraces": AccessLevel.CONTROLLER,
    "/tandem.v1.Traces/GetSnapshot": AccessLevel.CONTROLLER,
    "/tandem.v1.Traces/RecordRequests": AccessLevel.CONTROLLER,
    "/tandem.v1.Traces/GetDemand": AccessLevel.CONTROLLER,
}


def http_access(route: str) -> AccessLevel:
    return HTTP_ACCESS.get(route, AccessLevel.ADMIN)


def grpc_access(method: str) -> AccessLevel:
    return GRPC_ACCESS.get(method, AccessLevel.ADMIN)
