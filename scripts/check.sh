#!/usr/bin/env bash
# Everything that can be checked without running Tandem, in two lanes at once: types beside all else. Runs all steps, says
# which failed, exits 1 if any did.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-.venv/bin/python}
bin=$(dirname "$(command -v "$PYTHON")")
failed=$(mktemp)
trap 'rm -f "$failed"' EXIT

# Says all of a step at once, for the other lane speaks too.
step() {
  local name=$1 started=$SECONDS said
  shift
  if said=$("$@" 2>&1); then
    echo "== $name${said:+$'\n'$said}"$'\n'"   ok ($((SECONDS - started)) s)"
  else
    echo "$name" >>"$failed"
    echo "== $name${said:+$'\n'$said}"$'\n'"   FAILED" >&2
  fi
}

chart() {
  local helm values
  helm=$(scripts/fetch-helm.sh helm) || return 1
  "$helm" lint --strict --quiet helm/tandem || return 1
  for values in helm/tandem/examples/*.yaml; do
    "$helm" lint --strict --quiet helm/tandem --values "$values" || { echo "with $values" >&2; return 1; }
  done
}

types() {
  step "mypy" "$bin/mypy"
  step "mypy of scripts, examples, benchmarks, dashboards" \
    env MYPYPATH=scripts "$bin/mypy" --no-warn-unused-configs scripts/*.py examples/*.py examples/agent/*.py benchmarks/*.py deploy/grafana/*.py
  step "mypy of tests" "$bin/mypy" --no-warn-unused-configs tests
}

types &
step "ruff" "$bin/ruff" check --quiet .
step "ruff format" "$bin/ruff" format --quiet --check .
step "import rules" "$bin/lint-imports" --no-logo
step "banned calls" "$PYTHON" scripts/check-bans.py
step "generated protobuf code" scripts/generate-proto.sh --check
step "generated configuration page" "$PYTHON" scripts/generate-config-doc.py --check
step "generated chart schema" "$PYTHON" scripts/generate-chart-schema.py --check
step "generated README of the chart" "$PYTHON" scripts/generate-chart-readme.py --check
step "generated dashboards" "$PYTHON" scripts/generate-dashboards.py --check
step "generated API pages" "$PYTHON" scripts/generate-api-pages.py --check
step "acceptance page" "$PYTHON" scripts/generate-acceptance-page.py --check
step "generated quick start" "$PYTHON" scripts/generate-quickstart.py --check
step "generated requirements of the router image" "$PYTHON" scripts/generate-router-requirements.py --check
step "generated table of schemas" "$PYTHON" scripts/generate-schema-table.py --check
step "generated table of edits" "$PYTHON" scripts/generate-edit-table.py --check
step "generated pages of planning" "$PYTHON" scripts/generate-planner-pages.py --check
step "generated tables of figures" "$PYTHON" scripts/generate-figures.py --check
step "generated picture of speculation" "$PYTHON" scripts/generate-speculation-picture.py --check
step "generated table of clients' fields" "$PYTHON" scripts/generate-client-fields.py --check
step "documentation site" scripts/site.sh
step "hadolint" "$bin/hadolint" deploy/docker/Dockerfile
step "helm lint" chart
wait

if [ -s "$failed" ]; then
  sed 's/^/check: failed: /' "$failed" >&2
  exit 1
fi
echo "check: all good"
