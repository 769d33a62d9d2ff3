"""Streams a chat with the OpenAI client. Needs `pip install openai` and a running cluster.

    python examples/chat_openai.py "Why is the sky blue?"

TANDEM_HTTP: URL of the router (default http://127.0.0.1:8000). TANDEM_API_KEY: the API key, if the router requires one.
TANDEM_CA: the CA certificate (PEM), if the router uses TLS.
"""

from __future__ import annotations

import os
import ssl
import sys

from openai import APIConnectionError, DefaultHttpxClient, OpenAI, OpenAIError


def main(prompt: str) -> int:
    url = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8000")
    ca = os.environ.get("TANDEM_CA")
    http = None if ca is None else DefaultHttpxClient(verify=ssl.create_default_context(cafile=ca))
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "unused"), http_client=http)
    try:
        chat(client, prompt)
    except APIConnectionError as error:
        print(f"\nno answer from {url}: {error.__cause__ or error}", file=sys.stderr)
        return 1
    except OpenAIError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def chat(client: OpenAI, prompt: str) -> None:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} new]")


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "What is the capital of France?"))
