"""The access that each HTTP route and gRPC method requires.

What is not listed requires an admin key. A test checks that everything is listed.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.auth.principal import Access

HTTP_ACCESS: Mapping[str, Access] = {
    "/v1/chat/completions": Access.CALLER,
    "/v1/completions": Access.CALLER,
    "/v1/responses": Access.CALLER,
    "/tokenize": Access.CALLER,
    "/detokenize": Access.CALLER,
    "/tokenizer_info": Access.CALLER,
    "/v1/models": Access.CALLER,
    "/v1/models/{name:path}": Access.CALLER,
    "/openapi.json": Access.CALLER,
    "/health": Access.PUBLIC,
    "/ready": Access.PUBLIC,
    "/metrics": Access.ADMIN,
    "/dashboard": Access.PUBLIC,  # the page holds no data
    "/dashboard/": Access.PUBLIC,
    "/dashboard/static/{name}": Access.PUBLIC,
    "/dashboard/api/v1/snapshot": Access.ADMIN,
    "/dashboard/api/v1/requests/{request_id}": Access.ADMIN,
}

_INFERENCE = ("Generate", "Tokenize", "ListModels", "GetServerInfo")
_OIP = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
)  # fmt: skip
GRPC_ACCESS: Mapping[str, Access] = {
    **{f"/tandem.v1.Inference/{name}": Access.CALLER for name in _INFERENCE},
    **{f"/inference.GRPCInferenceService/{name}": Access.CALLER for name in _OIP},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.CALLER,
    "/grpc.health.v1.Health/Check": Access.PUBLIC,
    "/grpc.health.v1.Health/List": Access.PUBLIC,
    "/grpc.health.v1.Health/Watch": Access.PUBLIC,
    "/tandem.v1.Traces/GetTrace": Access.CONTROLLER,
    "/tandem.v1.Traces/ListTraces": Access.CONTROLLER,
    "/tandem.v1.Traces/GetSnapshot": Access.CONTROLLER,
    "/tandem.v1.Traces/RecordRequests": Access.CONTROLLER,
    "/tandem.v1.Traces/GetDemand": Access.CONTROLLER,
}


def http_access(route: str) -> Access:
    return HTTP_ACCESS.get(route, Access.ADMIN)


def grpc_access(method: str) -> Access:
    return GRPC_ACCESS.get(method, Access.ADMIN)
