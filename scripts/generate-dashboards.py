"""Writes the chart's Grafana dashboards from deploy/grafana.

generate-dashboards.py [--check]     --check: writes nothing; exits 1 if a dashboard is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.grafana.dashboards import DASHBOARDS

FOLDER = Path(__file__).resolve().parent.parent / "helm" / "tandem" / "files" / "dashboards"


def main(check: bool) -> int:
    wanted = {FOLDER / name: each.to_json() for name, each in DASHBOARDS.items()}
    present = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    if check and present != wanted:
        print("helm/tandem/files/dashboards is stale: run make docs", file=sys.stderr)
        return 1
    if not check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path in present.keys() - wanted.keys():
            path.unlink()
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
