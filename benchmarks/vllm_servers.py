"""Tandem, vLLM's server and vLLM's own pair, each in processes of its own, with the same engine and settings."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.live_cluster import live, spec_of
from benchmarks.vllm_client import MODEL, PeerFailed, Prompts, Server, VllmPair
from cluster.cli.commands.running import RunningCluster
from cluster.spec.resolve import free_ports
from tandem.v1 import inference_pb2, inference_pb2_grpc

HOST = "127.0.0.1"
NIXL = Path(__file__).resolve().parents[1] / ".cache" / "nixl"  # scripts/vllm.sh
SHARED_MEMORY = "/dev/shm"
START_S = 300.0
END_S = 30.0
LOG_CHARS = 3000  # of a server that does not start
NOT_MOVED = 2  # blocks at the end of a prompt that a decode server may compute itself


class Connector(Enum):
    """How KV goes from one vLLM to another on CPUs. NIXL: its UCX reads it. FILES: vLLM's example, in shared memory."""

    NIXL = "nixl"
    FILES = "files"

    def configs(self, files: Path) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """--kv-transfer-config of the prefill and of the decode server."""
        if self is Connector.NIXL:
            nixl = {"kv_connector": "NixlConnector"}
            return {**nixl, "kv_role": "kv_producer"}, {**nixl, "kv_role": "kv_consumer"}
        extra = {"shared_storage_path": str(files)}
        config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return config, config

    @property
    def asks(self) -> Mapping[str, object]:
        """Further fields of a request to the prefill server, as of vLLM's example proxy."""
        if self is Connector.FILES:
            return {}
        return {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


@dataclass(frozen=True, slots=True)
class Setup:
    """What both sides have alike. `threads`: of each engine."""

    folder: Path
    dtype: str
    threads: int
    block_tokens: int = 32
    context_tokens: int = 2048
    step_tokens: int = 2048  # vLLM's default for servers on CPUs
    requests: int = 64
    kv_blocks: int = 512
    kv_bytes: int = 1 << 30

    def vllm_flags(self) -> list[str]:
        values: dict[str, object] = {
            "served-model-name": MODEL,
            "dtype": self.dtype,
            "block-size": self.block_tokens,
            "max-model-len": self.context_tokens,
            "max-num-batched-tokens": self.step_tokens,
            "max-num-seqs": self.requests,
            "num-gpu-blocks-override": self.kv_blocks,
            "kv-cache-memory-bytes": self.kv_bytes,
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
        }
        switches = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "disable-log-stats")
        return [*(f"--{name}={value}" for name, value in values.items()), *(f"--{name}" for name in switches)]

    def tandem_changes(self, prefill: int) -> dict[str, Any]:
        engine = {
            "kind": "vllm",
            "dtype": self.dtype,
            "threads_per_rank": self.threads,
            "block_tokens": self.block_tokens,
            "max_model_tokens": self.context_tokens,
            "max_step_tokens": self.step_tokens,
            "max_running_requests": self.requests,
            "kv_blocks": self.kv_blocks,
            "kv_memory_bytes": self.kv_bytes,
        }
        return {
            "models.0.source": str(self.folder),
            "models.0.name": MODEL,
            "router.disaggregation": "always" if prefill else "never",
            **{f"models.0.engine.{name}": value for name, value in engine.items()},
        }


@asynccontextmanager
async def tandem(setup: Setup, prefill: int) -> AsyncIterator[RunningCluster]:
    """A router, so many prefill workers, and one decode worker."""
    async with live(spec_of(prefill, 1, setup.tandem_changes(prefill))) as cluster:
        yield cluster


async def handed_off(address: str, prompts: Prompts, tokens: int) -> list[list[int]]:
    """Greedy answers of Tandem's pair, one at a time. Raises PeerFailed if a prompt was not handed off."""
    answers: list[list[int]] = []
    sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        for prompt in prompts:
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
            answers.append([])
            async for event in stub.Generate(request):
                answers[-1] += event.chunk.token_ids
                if event.HasField("finished") and not event.finished.timeline.prefill_worker:
                    raise PeerFailed(f"expected Tandem to hand off {len(prompt)} tokens, and it did not")
    return answers


class VllmServer:
    """`vllm serve` in a process group of its own. It starts here; `ready` waits for it."""

    def __init__(self, setup: Setup, transfer: Mapping[str, object] | None = None) -> None:
        self._port, side_port = free_ports(HOST, HOST)
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", f"--model={setup.folder}"]
        command += [f"--host={HOST}", f"--port={self._port}", *setup.vllm_flags()]
        if transfer is not None:
            command.append(f"--kv-transfer-config={json.dumps(transfer)}")
        self._log = tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=os.environ | _environment(setup.threads, side_port),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def server(self) -> Server:
        return Server(f"{HOST}:{self._port}")

    async def ready(self) -> None:
        """Raises PeerFailed, with the end of its log."""
        try:
            async with asyncio.timeout(START_S):
                while not await asyncio.to_thread(self._is_healthy):
                    if self._process.poll() is not None:
                        raise PeerFailed(f"vLLM ended with status {self._process.returncode}: {self._end_of_log()}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise PeerFailed(f"vLLM did not start in {START_S:g} s: {self._end_of_log()}") from None
        self._free_cores()

    def end(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):  # all of its group have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _free_cores(self) -> None:
        """NIXL's connector leaves its process one core, the last, so both servers would compute on the same one."""
        cores = os.sched_getaffinity(0)
        leader = psutil.Process(self._process.pid)
        for process in (leader, *leader.children(recursive=True)):
            for thread in process.threads():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(thread.id, cores)

    def _end_of_log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-LOG_CHARS:]


def _environment(threads: int, side_port: int) -> dict[str, str]:
    """The threads are those of Tandem's ranks (cluster/control/worker_slot.py, tandem/vllm_engine/launch.py)."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "1000",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(NIXL),
        "VLLM_HOST_IP": HOST,
        "GLOO_SOCKET_IFNAME": "lo",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


@asynccontextmanager
async def vllm_servers(setup: Setup, *transfers: Mapping[str, object] | None) -> AsyncIterator[list[Server]]:
    """One server for each KV transfer configuration; None: without one. They start side by side."""
    async with AsyncExitStack() as stack:
        started: list[VllmServer] = []
        for transfer in transfers:
            started.append(VllmServer(setup, transfer))
            stack.push_async_callback(asyncio.to_thread, started[-1].end)
        for each in started:
            await each.ready()
        servers = [each.server for each in started]
        for server in servers:
            stack.callback(server.close)
        yield servers


@asynccontextmanager
async def vllm_pair(setup: Setup, connector: Connector) -> AsyncIterator[VllmPair]:
    """Raises PeerFailed if it does not start, as without the connector's package."""
    with tempfile.TemporaryDirectory(prefix="vllm-kv-", dir=SHARED_MEMORY) as folder:
        files = Path(folder)
        async with vllm_servers(setup, *connector.configs(files)) as (prefill, decode):
            yield VllmPair(prefill, decode, connector.asks, NOT_MOVED * setup.block_tokens, files)
