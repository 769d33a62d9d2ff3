"""Triton's gRPC client, on the Open Inference Protocol."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc.model_config_pb2 import TYPE_STRING

from tests.clients.asks import MODEL

if TYPE_CHECKING:
    from tests.clients.conftest import Server

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32}


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc) as client:
        yield client


def text_input(*shape: int) -> list[Any]:
    shape = shape or (1,)
    tensor = triton.InferInput("text_input", list(shape), "BYTES")
    tensor.set_data_from_numpy(np.full(shape, PROMPT.encode(), dtype=np.object_))
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


def test_text_with_a_batch_dimension(client: Any) -> None:
    assert "Paris" in text_of(client.infer(MODEL, text_input(1, 1), parameters=SAMPLING))


def test_configuration(client: Any) -> None:
    config = client.get_model_config(MODEL).config
    assert (config.name, config.backend, config.max_batch_size) == (MODEL, "tandem", 0)
    assert {each.name: each.data_type for each in config.input}["text_input"] == TYPE_STRING
    assert client.get_model_config(MODEL, as_json=True)["config"]["model_transaction_policy"] == {"decoupled": True}


def test_statistics_grow_with_each_answer(client: Any) -> None:
    (before,) = client.get_inference_statistics(MODEL).model_stats
    client.infer(MODEL, text_input(), parameters=SAMPLING)
    (after,) = client.get_inference_statistics().model_stats
    assert after.name == MODEL
    assert after.inference_count == before.inference_count + 1
    assert after.inference_stats.success.count == after.inference_count
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert after.last_inference > before.last_inference


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
