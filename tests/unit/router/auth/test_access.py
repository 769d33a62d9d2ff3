"""Every HTTP route and every gRPC method authenticates its callers, and no spelling of a path bypasses that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from starlette.routing import Route

from router.auth.access import GRPC_ACCESS, HTTP_ACCESS, KEY_HEADER_ROUTES, grpc_access, http_access
from router.auth.principal import AccessLevel
from router.dashboard.routes import DashboardEdge
from router.dashboard.shared_snapshots import SnapshotSource
from router.edge.controller_api import SECRET_KEY
from router.edge.http import HttpEdge
from router.edge.openapi import openapi_document
from router.service import RouterService
from tandem.oip import grpc_predict_v2_pb2
from tandem.v1 import inference_pb2, trace_pb2
from tandem.vllm_api import inference_pb2 as vllm_pb2
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
REFUSED = grpc.StatusCode.UNAUTHENTICATED
SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (inference_pb2, "Inference"),
        (trace_pb2, "Traces"),
        (grpc_predict_v2_pb2, "GRPCInferenceService"),
        (vllm_pb2, "Inference"),
        (health_pb2, "Health"),
        (reflection_pb2, "ServerReflection"),
    )
]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


def routes() -> list[Route]:
    dashboard = DashboardEdge(cast(SnapshotSource, None)).routes()
    return [*HttpEdge(cast(RouterService, None), max_body_bytes=1).routes(), *dashboard]


def requests() -> Iterator[tuple[str, str, AccessLevel]]:
    """(method, path, required access) of everything that the HTTP edge serves."""
    for route in routes():
        for method in sorted(route.methods or ()):
            path = route.path.replace("{name:path}", MODEL).replace("{name}", "app.js").replace("{request_id}", "r")
            yield method, path, HTTP_ACCESS[route.path]


def wrong_headers(keys: Keys) -> list[dict[str, str]]:
    right, other = keys.texts["operator"], keys.texts["acme"]
    values = [
        "", "Bearer", "Bearer x", right, f"Basic {right}", f"Token {right}", f"Bearer {right}x",
        f"Bearer {right[:-1]}", f"Bearer {right[:17]}{other[17:]}", f"Bearer {keys.texts['gone']}", "Bearer a.b.c",
        "Basic !", "Basic eDp5", f"Bearer {right.upper()}", "Bearer " + "x" * 60_000,
    ]  # fmt: skip
    header, cookie = {"x-api-key": right}, {"cookie": f"authorization={right}"}
    return [{}, header, header | {"authorization": "Bearer x"}, cookie, *({"authorization": v} for v in values)]


def test_the_table_lists_exactly_the_served_routes_and_methods() -> None:
    assert {route.path for route in routes()} == set(HTTP_ACCESS)
    documented = {path.replace("{name}", "{name:path}") for path in openapi_document()["paths"]}
    assert documented <= set(HTTP_ACCESS)
    assert openapi_document()["paths"]["/health"]["get"]["security"] == []
    assert openapi_document()["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    newer = {"/grpc.health.v1.Health/List"}  # in later versions of the library
    assert set(METHODS) | newer == set(GRPC_ACCESS)


def test_unlisted_routes_and_methods_require_an_admin() -> None:
    assert http_access("/new") is AccessLevel.ADMIN
    assert grpc_access("/new.Service/Method") is AccessLevel.ADMIN
    public = {path for path, access in HTTP_ACCESS.items() if access is AccessLevel.PUBLIC}
    page = {"/", "/dashboard", "/dashboard/", "/dashboard/static/{name}"}  # it holds no data
    assert public == {"/health", "/ready"} | page
    methods = [method for method, access in GRPC_ACCESS.items() if access is AccessLevel.PUBLIC]
    assert {method.split("/")[1] for method in methods} == {"grpc.health.v1.Health"}


@pytest.mark.acceptance(37, here="as stated")
async def test_every_route_refuses_a_missing_or_wrong_key(cluster: Cluster, keys: Keys) -> None:
    for method, path, access in requests():
        for headers in wrong_headers(keys):
            if path in KEY_HEADER_ROUTES and [*headers] == ["x-api-key"]:
                headers = {"x-api-key": f"{keys.texts['operator']}x"}
            answer = await cluster.http.request(method, path, headers=headers)
            if access is AccessLevel.PUBLIC:
                assert answer.status_code in (200, 307), path  # 307: redirect to the page
                continue
            assert answer.status_code == 401, (method, path, headers)
            challenge = answer.headers["www-authenticate"]
            assert challenge.startswith('Bearer realm="tandem"')
            assert ("Basic" in challenge) == (access is AccessLevel.ADMIN)
            if method != "HEAD":
                error = answer.json()["error"]
                if path in KEY_HEADER_ROUTES:
                    assert error["type"] == "authentication_error"
                else:
                    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
                assert keys.texts["operator"][20:] not in answer.text
    assert cluster.metric('tandem_requests_total{code="invalid_api_key"') > 100


@pytest.mark.parametrize("path", sorted(KEY_HEADER_ROUTES))
async def test_anthropics_header_takes_a_key_like_bearer(cluster: Cluster, keys: Keys, path: str) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    for tenant, status in (("acme", 200), ("gone", 401)):
        answer = await cluster.http.post(path, json=body, headers={"x-api-key": keys.texts[tenant]})
        assert answer.status_code == status, answer.text
    both = {"x-api-key": keys.texts["gone"]} | keys.bearer("acme")
    assert (await cluster.http.post(path, json=body, headers=both)).status_code == 200
    assert openapi_document()["paths"][path]["post"]["security"] == [{"key": []}, {"header": []}]


async def test_every_route_accepts_the_keys_that_it_requires(cluster: Cluster, keys: Keys) -> None:
    for method, path, access in requests():
        plain = await cluster.http.request(method, path, headers=keys.bearer("acme"))
        admin = await cluster.http.request(method, path, headers=keys.bearer("operator"))
        assert (plain.status_code == 403) == (access is AccessLevel.ADMIN), (method, path)
        assert plain.status_code != 401
        # 307: redirect to the page; 400: no body; 404: no such request.
        assert admin.status_code in (200, 307, 400, 404), (method, path)
    # Browsers and scrapers may send the key as a password, on admin routes only.
    for tenant, status in (("operator", 200), ("acme", 403)):
        assert (await cluster.http.get("/metrics", auth=("x", keys.texts[tenant]))).status_code == status
    assert (await cluster.http.get("/v1/models", auth=("x", keys.texts["operator"]))).status_code == 401


TRICKS = [
    "GET //metrics", "GET /metrics/", "GET /METRICS", "GET /./metrics", "GET /v1/../metrics", "GET /v1/%2e%2e/metrics",
    "GET /%6detrics", "GET /%6Detrics", "GET /metrics%20", "GET /metrics%00", "GET /metrics%2f",
    "GET /metrics?x=/health", "GET /metrics#/health", "GET /metrics;/health", "GET /health/../metrics",
    "GET /health/%2e%2e/metrics", "GET /health%2f..%2fmetrics", "GET /health;/../metrics", "GET /ready/metrics", "GET http://x/metrics",
    "GET http://x/health/../metrics", "GET /v1/models/../../metrics", "GET /v1/models/%2e%2e%2f%2e%2e%2fmetrics",
    "GET //v1/models", "GET /v1//models", "GET /v1/models/", "GET /V1/models", "GET /v1%2fmodels", "GET /v1\\models",
    "HEAD /metrics", "OPTIONS /metrics", "TRACE /metrics", "POST /metrics", "PUT /v1/completions", "get /metrics",
    "POST /v1/completions", "POST /v1/completions/", "POST //v1/completions", "POST /v1/%63ompletions",
    "POST /v1/chat/completions", "POST /v1/chat/../completions", "POST http://x/v1/chat/completions",
]  # fmt: skip
OVERRIDES = (
    "x-http-method-override: GET\r\nx-method-override: GET\r\nx-original-url: /health\r\nx-rewrite-url: /health\r\n"
    "x-forwarded-uri: /health\r\nx-forwarded-prefix: /health\r\nx-forwarded-for: 127.0.0.1\r\n"
)


@pytest.mark.parametrize("more", ["", OVERRIDES], ids=["plain", "overridden"])
@pytest.mark.acceptance(37, here="as stated")
async def test_no_spelling_of_a_path_bypasses_authentication(cluster: Cluster, more: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x"})
    for trick in TRICKS:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.app.http_port)
        head = f"{trick} HTTP/1.1\r\nhost: /health\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        writer.write(head.encode() + body.encode())
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        status = int(answer.split(b" ", 2)[1])
        assert status in (400, 401, 404, 405), (trick, answer[:200])
        assert b"tandem_requests" not in answer
        assert b'"data"' not in answer
        assert b"location:" not in answer.lower()
    assert not cluster.decode.received
    assert not cluster.prefill.received


async def call(cluster: Cluster, method: str, metadata: Any = ()) -> grpc.StatusCode:
    """The status of a call of any type of method; OK once it gets an answer.

    As one that takes one message, it is the same on the wire; a client's stream that is refused before it has written
    may end with the library's own INTERNAL."""
    running = cluster.raw_stream(method)(b"", metadata=metadata)
    try:
        async with asyncio.timeout(60):
            async for _ in running:
                break
    except grpc.aio.AioRpcError as error:
        return error.code()
    running.cancel()
    return grpc.StatusCode.OK


async def test_every_method_refuses_a_missing_or_wrong_key(cluster: Cluster, keys: Keys) -> None:
    wrong: list[tuple[tuple[str, str | bytes], ...]] = [tuple(headers.items()) for headers in wrong_headers(keys)]
    wrong = [each for each in wrong if all(len(value) < 5000 for _, value in each)]  # else the transport refuses it
    wrong.append((("authorization-bin", b"Bearer " + keys.texts["operator"].encode()),))
    for method in METHODS:
        public = GRPC_ACCESS[method] is AccessLevel.PUBLIC
        for metadata in wrong:
            assert (await call(cluster, method, metadata) is REFUSED) != public, (method, metadata)
    traces = [method for method in METHODS if GRPC_ACCESS[method] is AccessLevel.CONTROLLER]
    assert traces == [method for method in METHODS if method.startswith("/tandem.v1.Traces/")]
    for method in traces:
        assert await call(cluster, method, keys.metadata("operator")) is REFUSED
        assert await call(cluster, method, ((SECRET_KEY, "only-the-controller-knows"),)) is not REFUSED


async def test_every_method_accepts_the_keys_that_it_requires(cluster: Cluster, keys: Keys) -> None:
    for method in METHODS:
        if GRPC_ACCESS[method] is AccessLevel.CALLER:
            code = await call(cluster, method, keys.metadata("acme"))
            assert code not in (REFUSED, grpc.StatusCode.PERMISSION_DENIED), method
    for trick in ("/tandem.v1.Inference/generate", "//tandem.v1.Inference/Generate", "/tandem.v1.Inference/Generate/"):
        assert await call(cluster, trick) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_refusal_has_google_rpc_details(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.ListModels(inference_pb2.ListModelsRequest())
    assert refused.value.code() is REFUSED
    assert "Bearer" in str(refused.value.details())
    assert b"INVALID_API_KEY" in dict(refused.value.trailing_metadata())["grpc-status-details-bin"]
