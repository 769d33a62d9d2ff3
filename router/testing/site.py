"""A router in a separate process, with stub workers in this one, so that its resource use can be measured."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import psutil

from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import RouterSpec

MODEL = "tiny"
TIMEOUT_S = 60.0


class RouterSite:
    """Args:
    folder: for the router's launch file and log.
    model_dir: checkpoint with the router's tokenizer.
    """

    def __init__(self, folder: Path, model_dir: Path, spec: RouterSpec) -> None:
        self._launch_file = folder / "router.json"
        self._model_dir = model_dir
        self._spec = spec
        self._controller = StubController()
        self.workers = [
            StubWorker("p0", Role.PREFILL, MODEL, total_blocks=4096),
            StubWorker("d0", Role.DECODE, MODEL, total_blocks=4096),
        ]

    async def start(self) -> None:
        """Starts all processes and waits until the router is ready."""
        await self._controller.start()
        for worker in self.workers:
            await worker.start()
        await self._controller.set_workers(*self.workers)
        served = ServedModel(name=MODEL, model_dir=str(self._model_dir), model_fingerprint="f", block_tokens=16)
        launch = RouterLaunch(
            cluster="test",
            router_id="router-0",
            router=self._spec,
            models=(served,),
            controller_address=self._controller.address,
            redis_url=None,
        )
        self._launch_file.write_text(launch.model_dump_json())
        command = [sys.executable, "-m", "router", "--launch", str(self._launch_file)]
        with self._launch_file.with_suffix(".log").open("wb") as log:
            self._router = await asyncio.create_subprocess_exec(*command, stderr=log)
        self.process = psutil.Process(self._router.pid)
        await until(lambda: "router ready" in self.log(), TIMEOUT_S)
        ports = [re.search(rf"{name}=127.0.0.1:(\d+)", self.log()) for name in ("http", "grpc")]
        self.http_port, self.grpc_port = (int(found.group(1)) if found else 0 for found in ports)
        self.base_url = f"http://127.0.0.1:{self.http_port}"

    def log(self) -> str:
        return self._launch_file.with_suffix(".log").read_text()

    async def stop(self) -> None:
        """Stops all processes. Raises RuntimeError if the router exits with an error."""
        self._router.terminate()
        code = await self._router.wait()
        for worker in self.workers:
            await worker.kill()
        await self._controller.stop()
        if code != 0:
            raise RuntimeError(f"the router exited with {code}:\n{self.log()[-4000:]}")
