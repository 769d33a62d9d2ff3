#!/usr/bin/env bash
# Writes dist/sbom.cdx.json (CycloneDX): what Tandem and its dependencies are in this environment; then asks pip-audit whether
# any of it has a known vulnerability. A report: only the list itself can fail. Without a network the question is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$(command -v "$python")")

mkdir -p dist
"$bin/cyclonedx-py" environment --pyproject pyproject.toml --mc-type application --output-reproducible \
  --output-file dist/sbom.cdx.json "$python" 2>/dev/null
"$python" - <<'PYTHON_END'
import json
with open("dist/sbom.cdx.json", encoding="utf-8") as file:
    print(f"sbom: dist/sbom.cdx.json lists {len(json.load(file)['components'])} packages")
PYTHON_END

report=$(mktemp)
trap 'rm -f "$report"' EXIT
if timeout 120 "$bin/pip-audit" --local --skip-editable --progress-spinner off >"$report" 2>&1; then
  echo "audit: no known vulnerabilities"
elif grep -qE '^(Name|Found [0-9]+ known)' "$report"; then
  cat "$report"
else
  echo "audit: the advisory database could not be asked; nothing is known about vulnerabilities"
fi
