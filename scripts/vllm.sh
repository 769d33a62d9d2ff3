#!/usr/bin/env bash
# Installs Tandem and vLLM for CPUs in .cache/vllm, then runs tests/vllm there. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
vllm=.cache/vllm

if ! [ "$vllm/.stamp" -nt scripts/vllm-requirements.txt ] || ! [ "$vllm/.stamp" -nt scripts/vllm.sh ]; then
  rm -rf "$vllm"
  "$python" -m venv "$vllm"
  pip=("$vllm/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
  "${pip[@]}" "${TORCH:-torch==2.13.0}"
  "${pip[@]}" --no-deps --requirement scripts/vllm-requirements.txt
  touch "$vllm/.stamp"
fi

PYTHONPATH=$PWD OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false "$vllm/bin/python" -m pytest -n 2 tests/vllm "$@"
