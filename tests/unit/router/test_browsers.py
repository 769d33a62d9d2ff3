"""What browsers ask for: the API from pages of other origins, and the dashboard at the root."""

from __future__ import annotations

import pytest

from tandem.config.router import Disaggregation, RouterSpec
from tests.unit.router.conftest import Cluster

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_without_the_setting_no_page_may_read_an_answer(cluster: Cluster) -> None:
    reply = await cluster.http.get("/v1/models", headers={"origin": PAGE})
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert (await cluster.http.options("/v1/models", headers=PREFLIGHT)).status_code == 403


async def test_pages_of_strangers_reach_nothing_where_no_key_is_needed(cluster: Cluster) -> None:
    """A simple request, which browsers send without asking, and a name that leads to this machine."""
    body = '{"model": "tiny", "prompt": "a"}'
    sent = await cluster.http.post(
        "/v1/completions", content=body, headers={"origin": PAGE, "content-type": "text/plain"}
    )
    assert (sent.status_code, sent.json()["error"]["param"]) == (403, "origin")
    for origin in ("null", "http://[", "http://127.0.0.1.example.org", ""):
        assert (await cluster.http.get("/v1/models", headers={"origin": origin})).status_code == 403, origin
    for host in ("rebound.example.org", "rebound.example.org:8000", "127.0.0.1.example.org", "["):
        for path in ("/v1/models", "/metrics", "/dashboard/"):
            read = await cluster.http.get(path, headers={"host": host})
            assert (read.status_code, read.json()["error"]["param"]) == (403, "host"), host


async def test_this_machine_reaches_the_router_by_any_of_its_names(cluster: Cluster) -> None:
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "workstation", "workstation.local", "192.0.2.7:80"):
        assert (await cluster.http.get("/v1/models", headers={"host": host})).status_code == 200, host
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert (await cluster.http.get("/v1/models", headers=own)).status_code == 200


async def test_the_root_leads_to_the_dashboard(cluster: Cluster) -> None:
    reply = await cluster.http.get("/", follow_redirects=True)
    assert (reply.status_code, reply.url.path) == (200, "/dashboard/")


class TestAllowed:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, disaggregation=Disaggregation.ALWAYS, cors_origins=(PAGE,))

    async def test_scripts_of_the_named_pages_may_call(self, cluster: Cluster) -> None:
        reply = await cluster.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, PAGE)
        for body in ({"model": "tiny", "prompt": "a"}, {"model": "tiny", "prompt": "a", "stream": True}, {}):
            reply = await cluster.http.post("/v1/completions", json=body, headers={"origin": PAGE})
            assert reply.headers["access-control-allow-origin"] == PAGE, "errors too"
        reply = await cluster.http.get("/v1/models", headers={"origin": "https://other.example.org"})
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers
