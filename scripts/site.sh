#!/usr/bin/env bash
# Builds the documentation into .cache/site. Fails on any page, link or anchor that is not there, and on any reference to
# another host that a browser would follow by itself.
set -euo pipefail
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=1
"${PYTHON:-.venv/bin/python}" -m mkdocs build --strict --quiet
if grep -rlE '<(script|img|iframe)[^>]* src="?(https?:)?//|<link[^>]* rel="?(stylesheet|preconnect|icon)[^>]* href="?(https?:)?//' \
  .cache/site --include='*.html'; then
  echo "site: these pages load something from another host" >&2
  exit 1
fi
