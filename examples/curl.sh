#!/usr/bin/env bash
# The OpenAI-compatible API with curl. TANDEM_HTTP names the router (default http://127.0.0.1:8000); TANDEM_API_KEY is the
# key, where it asks for one; TANDEM_CA the authority (PEM) that signed its certificate.
set -euo pipefail
url=${TANDEM_HTTP:-http://127.0.0.1:8000}

ask() {
  curl --fail-with-body --silent --show-error --no-buffer ${TANDEM_CA:+--cacert "$TANDEM_CA"} \
    ${TANDEM_API_KEY:+--oauth2-bearer "$TANDEM_API_KEY"} "$@"
}

model=$(ask "$url/v1/models" | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)

echo "== models"
ask "$url/v1/models"

echo; echo "== a chat, streamed; the last chunk carries the token counts"
ask "$url/v1/chat/completions" \
  -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "temperature": 0, "max_tokens": 32, "stream": true,
       "stream_options": {"include_usage": true},
       "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

echo; echo "== a plain completion"
ask "$url/v1/completions" \
  -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "temperature": 0, "max_tokens": 8, "prompt": "Once upon a time"}'
echo
