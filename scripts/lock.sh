#!/usr/bin/env bash
# Writes deploy/docker/node.lock, router.lock and vllm.lock: the versions and hashes of all that the images install beside
# torch, which comes from an index of the builder's choice. Versions are those that the tests ran with
# (scripts/constraints.txt; scripts/vllm-requirements.txt names all of vLLM's environment).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tools=.cache/lock

if ! [ -x "$tools/bin/uv" ]; then
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
fi

"$python" - > "$tools/node.txt" <<'PYTHON_END'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(each for each in tomllib.load(file)["project"]["dependencies"] if not each.startswith("torch")))
PYTHON_END

lock() {
  "$tools/bin/uv" pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
    "$@"
}
rm -f deploy/docker/*.lock  # uv keeps versions of a lock that is there
lock --constraint scripts/constraints.txt "$tools/node.txt" --output-file deploy/docker/node.lock
lock --constraint scripts/constraints.txt deploy/docker/router-requirements.txt --output-file deploy/docker/router.lock
lock --no-deps scripts/vllm-requirements.txt --output-file deploy/docker/vllm.lock
