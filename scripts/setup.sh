#!/bin/sh
# setup.sh runtime|dev VENV: creates a virtual environment with Tandem as an editable install; `dev` adds development tools.
# PYTHON: the interpreter; default: the first supported one on PATH.
set -eu
cd "$(dirname "$0")/.."
what=$1
venv=$2

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
  if fits "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  echo "setup: expected Python 3.11, 3.12 or 3.13 with venv, found none; install one (Debian: python3 python3-venv) or set its path: make PYTHON=/path/to/python3.12" >&2
  exit 1
fi

if ! [ -x "$venv/bin/python" ] || ! fits "$venv/bin/python"; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

# Writes the dependency group to a file: this pip may be too old for --group.
set -- "${TORCH:-torch}" --constraint scripts/constraints.txt --editable .
if [ "$what" = dev ]; then
  "$venv/bin/python" - > "$venv/dev-requirements.txt" <<'PYTHON_END'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["dependency-groups"]["dev"]))
PYTHON_END
  set -- "$@" --requirement "$venv/dev-requirements.txt"
fi

echo "setup: installing Tandem ($what) into $venv; the first time takes a few minutes" >&2
# Shows only pip's progress lines. The exit status goes through a file, because sh has no pipefail.
status=$venv/.pip-status
{ "$venv/bin/python" -m pip install --no-compile --disable-pip-version-check --progress-bar off "$@" && echo 0 >"$status" || echo 1 >"$status"; } |
  grep --line-buffered -E '^(Collecting|Downloading|  Downloading|Installing|Successfully)' >&2 || true
failed=$(cat "$status")
rm -f "$status"
[ "$failed" = 0 ] || exit 1
# Compiles on all cores; pip would use one. Some packages contain files that do not compile.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" -m compileall -qq -j 0 "$site" || true
touch "$venv/.stamp-runtime"
if [ "$what" = dev ]; then touch "$venv/.stamp-dev"; fi
