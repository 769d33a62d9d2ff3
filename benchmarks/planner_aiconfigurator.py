"""aiconfigurator's answers; runs in its own virtual environment (scripts/planner-peers.sh).

    planner_aiconfigurator.py           TPOT, in seconds, of `cli_estimate`
    planner_aiconfigurator.py search    the best configuration of each kind, of `cli_default`

Reads a JSON object of arguments by name, and prints one of answers by name, of those that it has tables for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from aiconfigurator.cli.api import cli_default, cli_estimate


def tpot_s(arguments: Mapping[str, Any]) -> float:
    return float(cli_estimate(mode="agg", **arguments).tpot) / 1000


def best(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By kind; without a kind that meets the objectives with no configuration."""
    found = cli_default(**arguments, strict_sla=True).best_configs
    kinds = {"agg": "aggregated", "disagg": "disaggregated"}
    return {kinds[kind]: _described(frame.iloc[0].to_dict()) for kind, frame in found.items() if len(frame)}


def _described(row: Mapping[str, Any]) -> dict[str, Any]:
    """Workers, and devices in each. `step_tokens`: of prefill in a step of an aggregated worker."""
    split = "(p)tp" in row
    pools = {name: _pool(row, prefix) for name, prefix in (("prefill", "(p)"), ("decode", "(d)" if split else ""))}
    return {
        **(pools if split else pools | {"prefill": None}),
        "attention_dp": int(max(row[name] for name in ("dp", "(p)dp", "(d)dp") if name in row)),
        "devices": int(row["num_total_gpus"]),
        "step_tokens": None if split else int(row["ctx_tokens"]),
        "gemm": row["(d)gemm" if split else "gemm"],
        "ttft_s": row["ttft"] / 1000,
        "tpot_s": row["tpot"] / 1000,
        "requests_per_s_of_device": row["seq/s/gpu"],
    }


def _pool(row: Mapping[str, Any], prefix: str) -> tuple[int, int] | None:
    if f"{prefix}tp" not in row:
        return None
    return int(row.get(f"{prefix}workers", 1)), int(row[f"{prefix}tp"] * row[f"{prefix}pp"] * row[f"{prefix}dp"])


def main() -> None:
    logging.disable(logging.CRITICAL)
    ask = best if sys.argv[1:] == ["search"] else tpot_s
    found = {}
    for name, arguments in json.load(sys.stdin).items():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found[name] = ask(arguments)
        except Exception as error:  # it has no table for this
            print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps(found))


main()
