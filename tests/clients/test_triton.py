"""Triton's gRPC client, on the Open Inference Protocol."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.clients.asks import MODEL

if TYPE_CHECKING:
    from tests.clients.conftest import Server

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32}


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc) as client:
        yield client


def text_input() -> list[Any]:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
    return [tensor]


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def test_probes(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_server_metadata().name == "tandem"
    assert {tensor.name for tensor in client.get_model_metadata(MODEL).inputs} >= {"text_input", "input_ids"}


def test_whole_answer(client: Any) -> None:
    assert "Paris" in text_of(client.infer(MODEL, text_input(), parameters=SAMPLING))


def test_stream(client: Any) -> None:
    arrived: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    client.async_stream_infer(MODEL, text_input(), parameters=SAMPLING, enable_empty_final_response=True)
    texts = []
    while True:
        result, error = arrived.get(timeout=120.0)
        assert error is None
        texts.append(text_of(result))
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    assert len(texts) > 1
    assert "Paris" in "".join(texts)
