#!/usr/bin/env bash
# Prints the path of the pinned checkov, a policy linter of Kubernetes objects, installing it into .cache/tools when it is
# not there. It has an environment of its own: it pins a hundred packages that are none of ours.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.3.30
target=$PWD/.cache/tools/checkov-$version
if [ ! -x "$target/bin/checkov" ]; then
  python=$(command -v "${PYTHON:-python3}")
  mkdir -p .cache/tools
  rm -rf "$target" && "$python" -m venv "$target"
  "$target/bin/python" -m pip install --quiet --disable-pip-version-check "checkov==$version" >&2 || { rm -rf "$target"; exit 1; }
fi
echo "$target/bin/checkov"
