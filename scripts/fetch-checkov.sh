#!/usr/bin/env bash
# Prints the path of the pinned checkov, a policy linter for Kubernetes objects. Installs it into .cache/tools if needed, in
# an environment of its own, because it pins a hundred packages.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.3.30
mkdir -p .cache/tools
target=$(cd .cache/tools && pwd -P)/checkov-$version  # its scripts name the folder, which may be linked
if [ ! -x "$target/bin/checkov" ]; then
  python=$(command -v "${PYTHON:-python3}")
  rm -rf "$target" && "$python" -m venv "$target"
  "$target/bin/python" -m pip install --quiet --disable-pip-version-check "checkov==$version" >&2 || { rm -rf "$target"; exit 1; }
fi
echo "$target/bin/checkov"
