"""The effect of costly requests on others: the p99 of healthy streamed chats beside each kind of them, and beside none.

    python -m benchmarks.router_costly PORT CASE    # sends the requests of one case until its input ends

Router, workers and healthy clients have cores as in router_hostile; the client of the costly requests has the lowest
priority. It is another tenant, as otherwise healthy chats would wait for their turn behind its prompts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import say
from benchmarks.router_bench import MODEL, OTHER_CORES, ChatPrompts, RouterBench, RouterSetup, on_cores, running
from benchmarks.router_clients import RawHttpClient, TokenTimes, open_loop
from benchmarks.router_cost import ROUTER, bench_model
from benchmarks.router_hostile import ATTACKER_NICENESS, whole_ms
from tandem.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
HUGE = 10**4000
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs_of_prompts": (
        COMPLETIONS, {"prompt": [70] * 1500, "n": 30, "echo": True, "logprobs": 20, "max_tokens": 0}
    ),
    "logprobs_of_choices": (
        CHAT, {"messages": MESSAGES, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}
    ),
    "choices": (COMPLETIONS, {"prompt": "Hi", "n": 128, "max_tokens": 100}),
    "prompts": (COMPLETIONS, {"prompt": ["word " * 400] * 128, "max_tokens": 1}),
    "echo": (COMPLETIONS, {"prompt": "\u0001" * 4000, "n": 128, "echo": True, "max_tokens": 1}),
    "stop_strings": (
        COMPLETIONS,
        {"prompt": "Hi", "n": 32, "max_tokens": 100, "stop": ["a" * (240 + each) for each in range(16)]},
    ),
    "refused_body": (COMPLETIONS, {"prompt": "x" * (4 << 20 >> 1)}),
    "refused_values": (COMPLETIONS, {"prompt": [7] * 500_000}),
    "refused_integer": (COMPLETIONS, {"prompt": "Hi", "top_k": HUGE}),
    "unbounded_logprobs": (COMPLETIONS, {"prompt": "Hi", "n": 128, "logprobs": 20}),
    "logit_bias": (
        COMPLETIONS, {"prompt": "Hi", "n": 32, "max_tokens": 4, "logit_bias": {f"{each}": 1 for each in range(1024)}}
    ),
    "messages": (CHAT, {"messages": MESSAGES * 4096, "max_tokens": 1}),
    "tokenize": ("/tokenize", {"prompt": "word " * 3000}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CostlySizes:
    rate: float = 40.0  # healthy requests per second
    prompt_tokens: int = 64
    answer_tokens: int = 16
    seconds: float = 4.0
    rounds: int = 1
    cases: tuple[str, ...] = tuple(CASES)
    demo_model: bool = True


QUICK = CostlySizes(20, 16, 4, 0.5, 1, ("unbounded_logprobs", "choices"), demo_model=False)


def figures(sizes: CostlySizes) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, on_cores(OTHER_CORES):
        yield uvloop.run(_measure(sizes, bench_model(Path(folder), demo=sizes.demo_model)))


async def _measure(sizes: CostlySizes, model_dir: Path) -> Figure:
    stubs = ("--prefill", "2", "--decode", "4", "--step-ms", "20")
    prompts = ChatPrompts(Tokenizer.load(model_dir), sizes.prompt_tokens)
    found: list[tuple[float, float, float]] = []
    async with running(RouterSetup(model_dir, ROUTER, stubs)) as bench:
        client = RawHttpClient(bench.http_port, MODEL, sizes.answer_tokens)
        await open_loop(client, prompts, sizes.rate, min(2.0, sizes.seconds))  # warm-up, not counted
        for case in sizes.cases:
            calm: list[TokenTimes] = []
            under: list[TokenTimes] = []
            for _ in range(sizes.rounds):
                calm += await open_loop(client, prompts, sizes.rate, sizes.seconds)
                async with beside(bench, case):
                    under += await open_loop(client, prompts, sizes.rate, sizes.seconds)
            value, reference = whole_ms(under, 0.99), whole_ms(calm, 0.99)
            say(f"{case}, p99 of the answer: {reference:.0f} → {value:.0f} ms")
            found.append((value / reference, value, reference))
        await client.close()
    ratio, value, reference = max(found)
    return Figure("router.costly_request_p99_ms", round(value, 1), "ms", round(reference, 1), round(ratio, 2))


@asynccontextmanager
async def beside(bench: RouterBench, case: str) -> AsyncIterator[None]:
    """Within the context another process sends the requests of a case, one after the other."""
    command = ["nice", "-n", f"{ATTACKER_NICENESS}", sys.executable, "-m", "benchmarks.router_costly"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, f"{bench.http_port}", case, stdin=pipe, stdout=pipe)
    try:
        if process.stdout is None or not await process.stdout.readline():
            raise RuntimeError("the client of the costly requests did not start")
        yield
        output, _ = await process.communicate(b"\n")
        say(f"{case}: {output.decode().strip()}")
    finally:
        if process.returncode is None:
            process.kill()


async def send(port: int, case: str) -> None:
    path, fields = CASES[case]
    body = json.dumps({"model": MODEL, **fields}).encode()
    headers = f"host: x\r\nconnection: close\r\nx-tandem-tenant: costly\r\ncontent-length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode()
    statuses: dict[str, int] = {}
    received = 0
    print("begun", flush=True)
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not over.done():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        status = (await reader.readline()).decode().split(" ")[1]
        while (part := await reader.read(1 << 16)) and not over.done():
            received += len(part)
        statuses[status] = statuses.get(status, 0) + 1
        writer.close()
    print(json.dumps({"answers": statuses, "bytes": received}), flush=True)


if __name__ == "__main__":
    asyncio.run(send(int(sys.argv[1]), sys.argv[2]))
