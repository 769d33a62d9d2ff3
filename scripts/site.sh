#!/usr/bin/env bash
# Builds the documentation into .cache/site. Fails on missing pages, links and anchors, and on resources that a browser would
# load from another host.
set -euo pipefail
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=1
"${PYTHON:-.venv/bin/python}" -m mkdocs build --strict --quiet
if grep -rlE '<(script|img|iframe)[^>]* src="?(https?:)?//|<link[^>]* rel="?(stylesheet|preconnect|icon)[^>]* href="?(https?:)?//' \
  .cache/site --include='*.html'; then
  echo "site: expected pages without resources from other hosts, got the ones above" >&2
  exit 1
fi
