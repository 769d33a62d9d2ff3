"""NVIDIA's AIPerf, on chat and completions, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.asks import MODEL
from tests.clients.conftest import run_client

if TYPE_CHECKING:
    from tests.clients.conftest import Server

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 16


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_request_is_answered_and_counted(server: Server, folder: Path, endpoint: str) -> None:
    run_client(
        "-m", "aiperf", "profile", "--model", MODEL, "--url", server.url, "--endpoint-type", endpoint, "--streaming",
        "--concurrency", "2", "--request-count", str(REQUESTS), "--isl", str(PROMPT_TOKENS),
        "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true",
        folder=folder,
    )  # fmt: skip
    (found,) = folder.rglob("profile_export_aiperf.json")
    report: dict[str, Any] = json.loads(found.read_text())
    assert (report["request_count"]["avg"], report["request_error_rate"]["avg"]) == (REQUESTS, 0)
    assert report["usage_completion_tokens"]["avg"] == OUTPUT_TOKENS
    assert report["time_to_first_token"]["avg"] > 0
