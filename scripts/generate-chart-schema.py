"""Writes the configuration schema into the chart's values schema: Helm values under `cluster` have the same schema.

    generate-chart-schema.py [--check]

Everything else in helm/tandem/values.schema.json is hand-written and stays. --check: writes nothing; exits 1 if the
file is stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tandem.config.spec import ClusterSpec

SCHEMA = Path(__file__).resolve().parent.parent / "helm" / "tandem" / "values.schema.json"


def updated(schema: dict[str, Any]) -> dict[str, Any]:
    cluster = ClusterSpec.model_json_schema(mode="validation")
    definitions = cluster.pop("$defs")
    cluster["description"] = "The cluster spec (docs/configuration.md). The chart sets hosts, Redis and Ray itself."
    return {
        **schema,
        "properties": {**schema["properties"], "cluster": cluster},
        "$defs": {**schema.get("$defs", {}), **definitions},
    }


def main(check: bool) -> int:
    current = SCHEMA.read_text(encoding="utf-8")
    wanted = json.dumps(updated(json.loads(current)), indent=2, ensure_ascii=False) + "\n"
    if check and current != wanted:
        print("helm/tandem/values.schema.json is stale: run make docs", file=sys.stderr)
        return 1
    if not check:
        SCHEMA.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
