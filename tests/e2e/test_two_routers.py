"""`tandem up --routers 2` under Ray: both serve, and one that is killed comes back where it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, Golden

pytestmark = [pytest.mark.e2e, pytest.mark.soak_only]  # tests/integration/test_router_processes.py, under Ray


def answer(router: dict[str, Any], prompt: list[int]) -> str:
    client = openai.OpenAI(base_url=f"http://{router['http']}/v1", api_key="none", max_retries=0)
    done = client.completions.create(model="smollm2-135m", prompt=prompt, max_tokens=16, temperature=0)
    return done.choices[0].text


def wait_for(cluster: Cluster, restarts: list[int]) -> list[dict[str, Any]]:
    """The routers, when all of them serve after so many restarts of each."""
    deadline = time.monotonic() + 120.0
    while True:
        status = cluster.status()
        if status["router_ready"] and [router["restarts"] for router in status["routers"]] == restarts:
            routers: list[dict[str, Any]] = status["routers"]
            return routers
        assert time.monotonic() < deadline, status["routers"]
        time.sleep(0.2)


@pytest.mark.acceptance(6, soak="one kill")
def test_both_routers_serve_and_a_killed_one_comes_back(
    cluster_with: Callable[..., Cluster], golden: list[Golden]
) -> None:
    cluster = cluster_with("--routers", "2", "--name", "two-routers")
    first, second = wait_for(cluster, [0, 0])
    assert first["http"].endswith(f":{cluster.http_port}")
    prompt = golden[0].prompt_ids
    expected = answer(first, prompt)
    assert answer(second, prompt) == expected
    pid = next(found["pid"] for found in cluster.status()["processes"] if found["name"] == second["id"])
    os.kill(pid, signal.SIGKILL)
    assert answer(first, prompt) == expected, "the other one does not notice"
    assert wait_for(cluster, [0, 1])[1]["http"] == second["http"]
    assert answer(second, prompt) == expected
    assert "router-1 ready" in cluster.tandem("status").stdout
    cluster.note_descendants()
    cluster.assert_conserved()
