#!/usr/bin/env bash
# The wheel in dist/, installed in a clean environment outside the repository: its commands start, its modules import.
#   check-wheel.sh      PYTHON is that of an environment with the project's torch
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

torch=$("$PYTHON" -c 'from importlib.metadata import version; print("torch==" + version("torch").split("+")[0])')
"$PYTHON" -m venv "$work/clean"
cd "$work"
clean/bin/python -m pip install --no-compile --quiet --disable-pip-version-check "$torch" "$repository"/dist/*.whl
clean/bin/tandem --help >/dev/null
clean/bin/tandem version
clean/bin/tandem doctor --help >/dev/null
clean/bin/python "$repository/scripts/import-all.py" "$repository"
