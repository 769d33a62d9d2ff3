#!/usr/bin/env bash
# Installs the clients of `make clients` in .cache/clients, then runs tests/clients there. Arguments go to pytest.
# OpenAI's own client has a folder for each major version; Node's client needs npm; without it its test is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
clients=.cache/clients

if ! [ "$clients/.stamp" -nt scripts/clients-requirements.txt ] || ! [ "$clients/.stamp" -nt scripts/clients.sh ]; then
  rm -rf "$clients"
  "$python" -m venv "$clients"
  pip=("$clients/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" "${TORCH:-torch==2.13.0}" --requirement scripts/clients-requirements.txt  # GuideLLM needs torch
  for version in 1.109.1 2.54.0 3.57.0; do
    "${pip[@]}" --no-deps --target "$clients/openai-${version%%.*}" "openai==$version"
  done
  if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix "$clients/node" openai@7.57.0; fi
  touch "$clients/.stamp"
fi

TANDEM="$python -m cluster" "$clients/bin/python" -m pytest \
  -c tests/clients/pytest.ini --confcutdir tests/clients tests/clients "$@"
