"""`tandem up` as a user runs it on one GPU, without Ray: a prefill and a decode worker, each with a share of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.spec.resolve import free_ports
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.gpu.conftest import DEVICE, ON_GPU, VOCAB

pytestmark = pytest.mark.gpu
START_S = 120.0
LENGTHS = (1, 100, 333)
ENGINE: dict[str, Any] = {"kv_blocks": 256, "max_model_tokens": 400, "dtype": "bfloat16" if ON_GPU else "float32"}
SHARE: dict[str, Any] = {"device": "cuda", "device_share": 0.2} if ON_GPU else {}


def test_tandem_up_serves_the_tokens_of_one_engine_by_two_workers_on_one_gpu(
    model_dir: Path, tmp_path: Path, short_folder: Path
) -> None:
    share = SHARE | {"device": str(DEVICE)}
    alone = EngineDriver(single_rank(model_dir, tmp_path / "alone", **ENGINE | share).engine)
    for length in LENGTHS:
        alone.add(str(length), random_prompt(length, VOCAB, length), SamplingParams(temperature=0.0, max_tokens=20))
        alone.run()

    http, inference, admin = free_ports(*3 * ["127.0.0.1"])
    spec = {
        "name": f"gpu-{os.getpid()}",
        "models": [{"source": str(model_dir), "name": "tiny", "engine": ENGINE | SHARE}],
        "router": {"http_port": http, "grpc_port": inference, "disaggregation": "always"},
        "control": {"backend": "subprocess", "admin_port": admin},
    }
    config, log = tmp_path / "cluster.json", tmp_path / "up.log"
    config.write_text(json.dumps(spec))  # which is YAML
    env = os.environ | {"XDG_STATE_HOME": str(short_folder)}
    tandem = [sys.executable, "-m", "cluster"]
    with log.open("wb") as output:
        up = subprocess.Popen([*tandem, "up", "--config", str(config)], env=env, stdout=output, stderr=output)
    try:
        wait_ready(up, f"http://127.0.0.1:{http}/ready", log)
        with grpc.insecure_channel(f"127.0.0.1:{inference}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for length in LENGTHS:
                assert answer(stub, random_prompt(length, VOCAB, length)) == alone.tokens[str(length)], length
        command = [*tandem, "status", "--json", "--address", f"127.0.0.1:{admin}"]
        shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
        links = [link for worker in json.loads(shown)["workers"] for link in worker["links"]]
        assert {(link["transport"], link["state"]) for link in links} == {("mapped", "ready")}
    finally:
        up.send_signal(signal.SIGINT)
        code = up.wait(60)
    assert code == 0, log.read_text()[-4000:]


def wait_ready(up: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert up.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5.0) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    raise AssertionError(f"not ready within {START_S:g} s:\n{log.read_text()[-4000:]}")


def answer(stub: inference_pb2_grpc.InferenceStub, prompt: list[int]) -> list[int]:
    request = inference_pb2.GenerateRequest(
        model="tiny",
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0.0, max_tokens=20),
    )
    return [token for event in stub.Generate(request, timeout=60.0) for token in event.chunk.token_ids]
