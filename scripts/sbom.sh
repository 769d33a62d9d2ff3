#!/usr/bin/env bash
# Writes dist/sbom.cdx.json (CycloneDX), the list of Tandem and its dependencies in this environment. Then pip-audit looks for
# known vulnerabilities, and one that scripts/accepted-vulnerabilities.txt does not name fails the script. The database does
# not tell how severe each is, so all of them count. If it is not reachable, the audit is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tools=.cache/sbom

if ! [ "$tools/.stamp" -nt pyproject.toml ]; then
  rm -rf "$tools"
  "$python" -m venv "$tools"
  "$python" - > "$tools/requirements.txt" <<'PYTHON_END'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["dependency-groups"]["sbom"]))
PYTHON_END
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$tools/requirements.txt"
  touch "$tools/.stamp"
fi

mkdir -p dist
"$tools/bin/cyclonedx-py" environment --no-validate --pyproject pyproject.toml --mc-type application \
  --output-reproducible --output-file dist/sbom.cdx.json "$python" 2>/dev/null
"$python" - <<'PYTHON_END'
import json
with open("dist/sbom.cdx.json", encoding="utf-8") as file:
    print(f"sbom: dist/sbom.cdx.json lists {len(json.load(file)['components'])} packages")
PYTHON_END

accepted=()
while read -r id _; do accepted+=(--ignore-vuln "$id"); done < <(grep -E '^[A-Z]' scripts/accepted-vulnerabilities.txt || true)
report=$(mktemp)
trap 'rm -f "$report"' EXIT
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if timeout 120 "$tools/bin/pip-audit" --path "$packages" --skip-editable --progress-spinner off "${accepted[@]}" >"$report" 2>&1; then
  echo "audit: no known vulnerabilities"
elif grep -qE '^(Name|Found [0-9]+ known)' "$report"; then
  cat "$report"
  echo "audit: raise the version (scripts/constraints.txt, make lock), or accept it in scripts/accepted-vulnerabilities.txt" >&2
  exit 1
else
  echo "audit: skipped, because the advisory database is not reachable"
fi
