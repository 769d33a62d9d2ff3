#!/bin/sh
# Installs the peer of `make bench-planner --figure silicon` in a virtual environment under .cache/peers: aiconfigurator, whose
# tables of measurements the figure needs too. 250 MB.
set -eu
cd "$(dirname "$0")/.."
peer=.cache/peers/aiconfigurator
[ -x "$peer/bin/python" ] || "${PYTHON:-python3}" -m venv "$peer"
"$peer/bin/python" -m pip install --quiet "aiconfigurator==0.12.0"
