"""The alert rules, by Prometheus's own tool: well formed, each fires when it should and not when it should not.
And what only the tool can say of a panel's query."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana.promql import mean
from deploy.grafana.ttft import PARTS

ROOT = Path(__file__).resolve().parents[3]
RULES = sorted((ROOT / "helm" / "tandem" / "files" / "alerts").glob("*.yaml"))
CASES = sorted((ROOT / "tests" / "data" / "prometheus").glob("*.yaml"))

pytestmark = pytest.mark.system


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_well_formed() -> None:
    promtool("check", "rules", *RULES)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_the_rules_do_what_they_should(case: Path) -> None:
    promtool("test", "rules", case)


def test_the_mean_parts_of_the_ttft_add_up_to_its_mean(tmp_path: Path) -> None:
    """Of two routers: ten requests of 2 s each, of which four were handed off and one had an attempt that failed."""
    stages = {"queue": 5, "reserve": 1, "dispatch": 6, "prefill": 7, "first_token": 0.5, "retry": 0.5}
    series = {f'tandem_ttft_stage_seconds_sum{{stage="{stage}",': seconds for stage, seconds in stages.items()}
    series |= {"tandem_ttft_seconds_count{": 10, "tandem_ttft_seconds_sum{": 20}
    chosen = {"$namespace": ".*", "$job": ".*", "$model": ".*", "$__rate_interval": "5m"}

    def query(expr: str) -> str:
        for name, value in chosen.items():
            expr = expr.replace(name, value)
        return f"round({expr}, 0.001)"

    expected = [{"labels": f'{{stage="{stage}"}}', "value": seconds / 10} for stage, seconds in stages.items()]
    case = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'{name}model="m",job="{job}",namespace="n"}}', "values": f"0+{each / 2}x20"}
                    for name, each in series.items()
                    for job in ("a", "b")
                ],
                "promql_expr_test": [
                    {"expr": query(PARTS), "eval_time": "10m", "exp_samples": expected},
                    {
                        "expr": query(f"sum({PARTS})"),
                        "eval_time": "10m",
                        "exp_samples": [{"labels": "{}", "value": sum(stages.values()) / 10}],
                    },
                    {
                        "expr": query(mean("tandem_ttft_seconds")),
                        "eval_time": "10m",
                        "exp_samples": [{"labels": "{}", "value": 2}],
                    },
                ],
            }
        ]
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    promtool("test", "rules", path)


def test_the_pages_recipe_gives_each_worker_its_share_however_many_routers_report(tmp_path: Path) -> None:
    """Two decode workers, 80 % and 40 % full; half of the TTFTs are below 1 s, all below 4 s. No TPOT yet."""
    page = (ROOT / "docs" / "live-ratio.md").read_text()
    (rules,) = re.findall(r"^```yaml\n(groups:.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "rules.yaml").write_text(rules)
    steady = {
        f'tandem_worker_blocks{{model="m",role="decode",worker="{worker}",state="{state}",': blocks
        for worker, blocks_of in {"d0": (10, 10, 10, 70), "d1": (0, 60, 0, 40)}.items()
        for state, blocks in zip(("free", "cached", "leased", "in_use"), blocks_of, strict=True)
    }
    for role in ("prefill", "decode"):
        steady |= {f'tandem_worker_up{{model="m",role="{role}",worker="{role[0]}{number}",': 1 for number in (0, 1)}
    counted = {"1": 1, "4": 2, "+Inf": 2}
    growing = {f'tandem_ttft_seconds_bucket{{model="m",le="{bound}",': count for bound, count in counted.items()}
    series = [{"series": f'{name}namespace="n",pod="{router}"}}', "values": f"{value}x10"}
              for name, value in steady.items() for router in "ab"]  # fmt: skip
    series += [
        {"series": f'{name}namespace="n",pod="a"}}', "values": f"0+{value}x10"} for name, value in growing.items()
    ]
    expected = {"tandem_pool_kv_in_use": 1.2, "tandem_pool_tpot_share": 0, "tandem_pool_ttft_share": 2 * 3.4 / 2}
    tests = [
        {"expr": f"round({name}, 0.001)", "eval_time": "9m", "exp_samples": [
            {"labels": '{namespace="n", model="m"}', "value": value}]}
        for name, value in expected.items()
    ]  # fmt: skip
    case = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}  # fmt: skip
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case))
    promtool("test", "rules", tmp_path / "case.yaml")
