"""GuideLLM: its default request format, and completions, with several requests at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import run_client

if TYPE_CHECKING:
    from tests.clients.conftest import Server

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 16


@pytest.mark.parametrize("request_format", ["", ",request_format=/v1/completions"], ids=["default", "completions"])
def test_every_request_is_answered_and_counted(server: Server, folder: Path, request_format: str) -> None:
    run_client(
        "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={server.url}{request_format}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        folder=folder,
    )  # fmt: skip
    report: dict[str, Any] = json.loads((folder / "benchmarks.json").read_text())
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == OUTPUT_TOKENS
