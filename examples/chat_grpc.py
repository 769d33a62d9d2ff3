"""Streams a chat over Tandem's gRPC API and prints the time of each stage. Needs a running cluster.

    python examples/chat_grpc.py "Why is the sky blue?"

TANDEM_GRPC: address of the router (default 127.0.0.1:50051). TANDEM_API_KEY: the API key, if the router requires one.
TANDEM_CA: the CA certificate (PEM), if the router uses TLS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc

from tandem.v1 import inference_pb2, inference_pb2_grpc


def show(timeline: inference_pb2.Timeline) -> None:
    for name in ("queue_s", "prefill_s", "handoff_s", "decode_s", "total_s"):
        print(f"  {name[:-2]:<8} {1000 * getattr(timeline, name):8.1f} ms")
    print(
        f"  moved    {timeline.kv_bytes_moved:8} bytes of KV cache, "
        f"{timeline.prefill_worker or 'no prefill worker'} → {timeline.decode_worker}"
    )


def channel() -> grpc.Channel:
    address, ca = os.environ.get("TANDEM_GRPC", "127.0.0.1:50051"), os.environ.get("TANDEM_CA")
    if ca is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(ca).read_bytes()))


def main(prompt: str) -> int:
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=64),
    )
    key = os.environ.get("TANDEM_API_KEY")
    metadata = None if key is None else (("authorization", f"Bearer {key}"),)
    with channel() as connected:
        try:
            for response in inference_pb2_grpc.InferenceStub(connected).Generate(request, metadata=metadata):
                print(response.chunk.text, end="", flush=True)
                if response.HasField("finished"):
                    usage = response.finished.usage
                    print(
                        f"\n[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached, "
                        f"{usage.completion_tokens} new]"
                    )
                    show(response.finished.timeline)
        except grpc.RpcError as error:
            print(f"\n{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or "What is the capital of France?"))
