"""The router as the cluster starts it: a process of its own."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, script, until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.errors import TandemError, UnavailableError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub

TIMEOUT_S = 60


def launch_file(folder: Path, model_dir: Path, controller: str, *, drain_timeout_s: float = 30.0, **ports: int) -> Path:
    served = ServedModel(name="tiny", model_dir=str(model_dir), model_fingerprint="f", block_tokens=16)
    launch = RouterLaunch(
        cluster="test",
        router_id="router-0",
        router=RouterSpec(drain_timeout_s=drain_timeout_s, **ports),
        models=(served,),
        controller_address=controller,
        redis_url=None,
    )
    path = folder / "router.json"
    path.write_text(launch.model_dump_json())
    return path


async def start(path: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--launch", str(path), stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
    )


async def ports_of(process: asyncio.subprocess.Process) -> tuple[int, int]:
    """HTTP and gRPC, once it listens."""
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        while b"router listening" not in (line := await process.stderr.readline()):
            assert line, "it has ended"
    found = re.findall(rb"(?:http|grpc)=127\.0\.0\.1:(\d+)", line)
    return int(found[0]), int(found[1])


def test_threads_that_wake_do_not_interrupt_the_main_one() -> None:
    """Nor do those that they start."""
    code = """if True:
        import os, threading
        from router.__main__ import let_threads_wait
        go, policies = threading.Event(), []

        def start_another():
            go.wait()
            another = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
            another.start()
            another.join()
            policies.append(os.sched_getscheduler(0))

        thread = threading.Thread(target=start_another)
        thread.start()
        let_threads_wait()
        go.set()
        thread.join()
        assert policies == [os.SCHED_BATCH] * 2, policies
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("option", ["http_port", "grpc_port"])
async def test_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path, model_dir: Path, option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"http_port": 0, "grpc_port": 0} | {option: taken.getsockname()[1]}
        process = await start(launch_file(tmp_path, model_dir, "127.0.0.1:1", **ports))
        async with asyncio.timeout(TIMEOUT_S):
            _, stderr = await process.communicate()
    assert process.returncode == 2
    lines = [line for line in stderr.decode().splitlines() if f"router.{option}" in line]
    assert len(lines) == 1, stderr.decode()
    assert "Traceback" not in stderr.decode()


@pytest.mark.parametrize("option", ["--name=east", "--http-port=9000", "--tls-ca=ca.pem"])
def test_an_option_of_joining_is_refused_beside_a_launch_file(option: str) -> None:
    command = [sys.executable, "-m", "router", "--launch", "never-read.json", option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert f"{option.partition('=')[0]}: expected together with --join" in done.stderr


async def test_missing_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    process = await start(launch_file(tmp_path, tmp_path / "none", "127.0.0.1:1", http_port=0, grpc_port=0))
    async with asyncio.timeout(TIMEOUT_S):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in stderr.decode()


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def test_serves_then_finishes_what_it_has_on_sigterm(tmp_path: Path, model_dir: Path) -> None:
    controller, worker = StubController(), StubWorker("d0", Role.DECODE, "tiny")
    await controller.start()
    await worker.start()
    await controller.set_workers(worker)
    process = await start(launch_file(tmp_path, model_dir, controller.address, http_port=0, grpc_port=0))
    port, _ = await ports_of(process)
    worker.behaviour.token_delay_s = 0.1
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, verify=False) as client:
        await until_ready(client)
        body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 5}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: bool(worker.received))
        process.send_signal(signal.SIGTERM)
        assert (await request).status_code == 200
    async with asyncio.timeout(TIMEOUT_S):
        _, stderr = await process.communicate()
    assert process.returncode == 0
    text = stderr.decode()
    assert "router ready" in text
    assert "Traceback" not in text
    await worker.kill()
    await controller.stop()


async def test_while_it_drains_it_is_not_ready_and_takes_nothing_new(tmp_path: Path, model_dir: Path) -> None:
    controller, worker = StubController(), StubWorker("d0", Role.DECODE, "tiny")
    await controller.start()
    await worker.start()
    await controller.set_workers(worker)
    process = await start(launch_file(tmp_path, model_dir, controller.address, http_port=0, grpc_port=0))
    port, _ = await ports_of(process)
    worker.behaviour.answer, worker.behaviour.token_delay_s = script([70] * 500), 0.2
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, verify=False) as client:
        await until_ready(client)
        body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 100}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: bool(worker.received))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT_S):
            while (await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.02)
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert "shutting down" in refused.text
        worker.behaviour.token_delay_s = 0.0
        assert (await running).status_code == 200
    async with asyncio.timeout(TIMEOUT_S):
        assert await process.wait() == 0
    assert len(worker.frames("generate")) == 1
    await worker.kill()
    await controller.stop()


@pytest.mark.acceptance(31, here="a router's: a stream, a whole answer, and both over gRPC")
async def test_answers_that_outlast_the_drain_of_their_router_end_with_an_error_of_their_protocol(
    tmp_path: Path, model_dir: Path
) -> None:
    controller, worker = StubController(), StubWorker("d0", Role.DECODE, "tiny")
    await controller.start()
    await worker.start()
    await controller.set_workers(worker)
    path = launch_file(tmp_path, model_dir, controller.address, drain_timeout_s=0.3, http_port=0, grpc_port=0)
    process = await start(path)
    http_port, grpc_port = await ports_of(process)
    worker.behaviour.answer, worker.behaviour.token_delay_s = script([70] * 1000), 0.05
    body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 1000}
    events: list[str] = []
    messages: list[pb.GenerateResponse] = []

    async def stream() -> None:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                events.extend([line] if line else [])

    async def generate() -> TandemError | None:
        request = pb.GenerateRequest(prompt="Hello there", sampling=pb.SamplingParams(max_tokens=1000))
        try:
            async for message in InferenceStub(channel).Generate(request):
                messages.append(message)
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        return None

    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=TIMEOUT_S, verify=False) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        await until_ready(client)
        streamed, generated = asyncio.create_task(stream()), asyncio.create_task(generate())
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(worker.frames("generate")) == 3 and len(messages) > 3 and bool(events))
        process.send_signal(signal.SIGTERM)
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        await streamed
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert len(events) > 1, "what there was came before"
        assert not any('"finish_reason":"' in event for event in events)
        assert isinstance(await generated, UnavailableError)
        assert not any(message.HasField("finished") for message in messages)
    async with asyncio.timeout(TIMEOUT_S):
        _, stderr = await process.communicate()
    assert process.returncode == 0
    assert "requests were cut off by the stop" in stderr.decode()
    await until(lambda: len(worker.cancelled) == 3)  # it computes nothing for them any more
    await worker.kill()
    await controller.stop()
