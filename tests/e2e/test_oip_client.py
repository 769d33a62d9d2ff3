"""The Open Inference Protocol against a whole cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, Golden

pytestmark = pytest.mark.e2e
MODEL = "smollm2-135m"


def ask(text: str) -> oip.ModelInferRequest:
    contents = oip.InferTensorContents(bytes_contents=[text.encode()])
    tensor = oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=contents)
    parameters = {
        "temperature": oip.InferParameter(double_param=0.0),
        "max_tokens": oip.InferParameter(int64_param=32),
    }
    return oip.ModelInferRequest(model_name=MODEL, id="7", inputs=[tensor], parameters=parameters)


def text_of(reply: oip.ModelInferResponse) -> str:
    return next(each.contents.bytes_contents[0].decode() for each in reply.outputs if each.name == "text_output")


def test_a_general_inference_client_is_answered(cluster: Cluster, golden: list[Golden]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(oip.ServerLiveRequest()).live
        assert stub.ServerReady(oip.ServerReadyRequest()).ready
        assert stub.ModelReady(oip.ModelReadyRequest(name=MODEL)).ready
        assert stub.ModelMetadata(oip.ModelMetadataRequest(name=MODEL)).platform == "tandem"
        whole = stub.ModelInfer(ask(golden[0].text))
        assert (whole.id, text_of(whole)) == ("7", "The capital of France is Paris.")
        parts = list(stub.ModelStreamInfer(iter([ask(golden[0].text)])))
    assert len(parts) > 1
    assert "".join(text_of(part.infer_response) for part in parts) == "The capital of France is Paris."
