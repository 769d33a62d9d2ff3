#!/usr/bin/env bash
# Installs Tandem and vLLM for CPUs in .cache/vllm, then runs there:
#   scripts/vllm.sh test ...     tests/vllm; arguments go to pytest
#   scripts/vllm.sh bench ...    benchmarks/vllm_pair.py, with NIXL for vLLM's own pair in .cache/nixl
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
vllm=.cache/vllm nixl=.cache/nixl
what=${1:-}
if [ "$what" != test ] && [ "$what" != bench ]; then
  echo "usage: scripts/vllm.sh test|bench [ARGUMENTS]" >&2
  exit 2
fi
shift

pip=("$vllm/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
if ! [ "$vllm/.stamp" -nt scripts/vllm-requirements.txt ] || ! [ "$vllm/.stamp" -nt scripts/vllm.sh ]; then
  rm -rf "$vllm"
  "$python" -m venv "$vllm"
  "${pip[@]}" "${TORCH:-torch==2.13.0}"
  "${pip[@]}" --no-deps --requirement scripts/vllm-requirements.txt
  touch "$vllm/.stamp"
fi

export PYTHONPATH=$PWD OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [ "$what" = test ]; then exec "$vllm/bin/python" -m pytest -n 2 tests/vllm "$@"; fi

if ! [ "$nixl/.stamp" -nt scripts/vllm.sh ]; then
  rm -rf "$nixl"
  if "${pip[@]}" --no-deps --target "$nixl" nixl==1.5.1 nixl-cu12==1.5.1; then
    touch "$nixl/.stamp"
  else
    echo "NIXL cannot be installed: vLLM's pair is measured without it" >&2
  fi
fi
exec "$vllm/bin/python" -m benchmarks.vllm_pair "$@"
