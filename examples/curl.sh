#!/usr/bin/env bash
# Calls the OpenAI-compatible API with curl. TANDEM_HTTP: URL of the router (default http://127.0.0.1:8000). TANDEM_API_KEY:
# the API key, if the router requires one. TANDEM_CA: the CA certificate (PEM), if the router uses TLS.
set -euo pipefail
url=${TANDEM_HTTP:-http://127.0.0.1:8000}

call() {
  curl --fail-with-body --silent --show-error --no-buffer ${TANDEM_CA:+--cacert "$TANDEM_CA"} \
    ${TANDEM_API_KEY:+--oauth2-bearer "$TANDEM_API_KEY"} "$@"
}

model=$(call "$url/v1/models" | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)

echo "== models"
call "$url/v1/models"

echo; echo "== a chat, streamed; the last chunk carries the token counts"
call "$url/v1/chat/completions" \
  -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "temperature": 0, "max_tokens": 32, "stream": true,
       "stream_options": {"include_usage": true},
       "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

echo; echo "== a plain completion"
call "$url/v1/completions" \
  -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "temperature": 0, "max_tokens": 8, "prompt": "Once upon a time"}'
echo
