"""lm-eval on a task of its own: its local-completions scores choices, its local-chat-completions generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.asks import MODEL
from tests.clients.conftest import run_client

if TYPE_CHECKING:
    from tests.clients.conftest import Server

CAPITALS = {"France": "Paris", "Norway": "Oslo", "Japan": "Tokyo", "Egypt": "Cairo"}
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_target": "{{capital}}",
}
SCORED = COMMON | {
    "task": "capitals_scored",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": sorted(CAPITALS.values()),
    "metric_list": [{"metric": "acc"}],
}
GENERATED = COMMON | {
    "task": "capitals_generated",
    "output_type": "generate_until",
    "doc_to_text": "What is the capital of {{country}}?",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32},
    "filter_list": [
        {
            "name": "city",
            "filter": [
                {"function": "regex", "regex_pattern": f"({'|'.join(CAPITALS.values())})"},
                {"function": "take_first"},
            ],
        }
    ],
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(task: dict[str, Any], model: str, arguments: str, folder: Path, *more: str) -> dict[str, Any]:
    """The task's results and samples."""
    rows = [json.dumps({"country": country, "capital": capital}) for country, capital in CAPITALS.items()]
    data = folder / "capitals.jsonl"
    data.write_text("\n".join(rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    told = task | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    (tasks / "capitals.yaml").write_text(json.dumps(told))  # JSON is YAML
    out = folder / "out"
    run_client(
        "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", task["task"],
        "--include_path", str(tasks), "--output_path", str(out), *more, folder=folder,
    )  # fmt: skip
    (found,) = out.rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())
    assert results["n-samples"][task["task"]] == {"original": len(CAPITALS), "effective": len(CAPITALS)}
    metrics: dict[str, Any] = results["results"][task["task"]]
    return metrics


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_choices_are_scored(server: Server, folder: Path, backend: str) -> None:
    """The default is the tokenizer of Hugging Face."""
    arguments = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer_backend={backend}"
    assert evaluate(SCORED, "local-completions", arguments, folder)["acc,none"] == 1.0


def test_answers_are_generated(server: Server, folder: Path) -> None:
    arguments = f"model={MODEL},base_url={server.url}/v1/chat/completions"
    found = evaluate(GENERATED, "local-chat-completions", arguments, folder, "--apply_chat_template")
    assert found["exact_match,city"] == 1.0
