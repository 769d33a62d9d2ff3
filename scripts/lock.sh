#!/usr/bin/env bash
# Writes deploy/docker/node.lock and router.lock: the versions and hashes of all that the images install beside torch, which
# comes from an index of the builder's choice. Versions are those that the tests ran with (scripts/constraints.txt).
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
    --constraint scripts/constraints.txt "$1" --output-file "$2"
}
rm -f deploy/docker/node.lock deploy/docker/router.lock  # uv keeps versions of a lock that is there
lock "$tools/node.txt" deploy/docker/node.lock
lock deploy/docker/router-requirements.txt deploy/docker/router.lock
