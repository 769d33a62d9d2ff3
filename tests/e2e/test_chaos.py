"""Random faults in every part of a cluster: each request ends once, and rightly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cli.admin_client import Admin
from cluster.testing.chaos import Chaos
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.soak]
VOCAB = 300
FOR_S, EVERY_S = (3600.0, 30.0) if os.environ.get("TANDEM_SOAK") else (60.0, 4.0)


PLAIN: dict[str, object] = {}
DRAFTED = {"speculation": "draft", "speculation_weights": "int8", "speculation_adaptive": False}


@pytest.mark.acceptance(17, here="a minute, a fault each 4 s, without Ray", soak="an hour")
@pytest.mark.parametrize("speculates", [PLAIN, DRAFTED], ids=["plain", "with a draft model"])
async def test_through_random_faults_every_request_ends_once_and_rightly(
    cluster_with: Callable[..., Cluster], tmp_path: Path, speculates: dict[str, object]
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", vocab=VOCAB, seed=1)
    pools = {"prefill": {"workers": 2}, "decode": {"workers": 2}, "engine": {"kv_blocks": 400, **speculates}}
    spec = {
        "models": [{"source": str(model), **pools}],
        "router": {"replicas": 2, "disaggregation": "always"},
        "control": {"backend": "subprocess"},
    }
    cluster = await asyncio.to_thread(cluster_with, spec=spec)
    routers = [each["http"] for each in cluster.status()["routers"]]
    prompts = [random_prompt(40 + 30 * number, VOCAB, number) for number in range(12)]
    chaos = Chaos(Admin(f"127.0.0.1:{cluster.admin_port}"), routers, cluster.process.pid, "tiny", prompts, seed=1)
    history = await chaos.run(FOR_S, EVERY_S, streams=4)
    print(len(history.entries), history.retried, history.faults, history.failures())
    assert history.wrong == 0
    assert history.miscounted == []
    assert history.success >= 0.999, history.failures()
    cluster.note_descendants()
    cluster.assert_conserved()
