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
    assert "access-control-allow-origin" not in reply.headers
    assert (await cluster.http.options("/v1/models", headers=PREFLIGHT)).status_code == 405


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
        assert "access-control-allow-origin" not in reply.headers
