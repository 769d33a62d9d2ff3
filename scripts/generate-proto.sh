#!/usr/bin/env bash
# Generates tandem/v1 from proto/tandem/v1. With --check: fails when what is committed differs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$(command -v "$python")")
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -Iproto --python_out="$out" --mypy_out="$out" \
  --grpc_python_out="$out" --mypy_grpc_out="$out" proto/tandem/v1/*.proto
touch "$out/tandem/v1/__init__.py"
if [ "${1:-}" = --check ]; then
  diff -ru --exclude=__pycache__ tandem/v1 "$out/tandem/v1" || { echo "tandem/v1 is stale: run scripts/generate-proto.sh" >&2; exit 1; }
else
  rm -rf tandem/v1 && cp -r "$out/tandem/v1" tandem/v1
fi
