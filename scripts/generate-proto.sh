#!/usr/bin/env bash
# Generates tandem/v1, tandem/oip and tandem/vllm_api from proto/tandem. --check: writes nothing; fails if the committed files differ.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$(command -v "$python")")
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -Iproto --python_out="$out" --mypy_out="$out" \
  --grpc_python_out="$out" --mypy_grpc_out="$out" proto/tandem/*/*.proto
for package in v1 oip vllm_api; do
  touch "$out/tandem/$package/__init__.py"
  if [ "${1:-}" = --check ]; then
    diff -ru --exclude=__pycache__ "tandem/$package" "$out/tandem/$package" \
      || { echo "tandem/$package is stale: run scripts/generate-proto.sh" >&2; exit 1; }
  else
    rm -rf "tandem/$package" && cp -r "$out/tandem/$package" "tandem/$package"
  fi
done
