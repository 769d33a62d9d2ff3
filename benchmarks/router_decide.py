"""One placement of a very long prompt, in this process: hashing, the dispatcher's look-up, and the policy."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.handoff_figures import Figure
from router.app import RouterApp
from router.policies.types import Placement
from router.request_terms import RequestTerms
from router.requests.output import OutputAssembler
from router.requests.raw_request import ValidRequest
from router.requests.state_machine import RequestRun
from router.testing.controller import StubController
from router.testing.stub_worker import StubWorker, until
from tandem.config.launch import RouterLaunch, ServedModel
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.kvcache.blockhash import HASH_BYTES, BlockHash, HashKey, hash_blocks
from tandem.kvcache.prefix_events import PrefixSnapshot, join_hashes
from tandem.request import SamplingParams
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2

MODEL = "bench"
BLOCK_TOKENS = 16
VOCAB = 512
TOTAL_BLOCKS = 1 << 20
FILLER_BLOCKS = 20_000  # per worker, of other prompts


@dataclass(frozen=True, slots=True)
class DecideSizes:
    prompt_tokens: int = 100_000
    prefill_workers: int = 32
    decode_workers: int = 32
    runs: int = 51


QUICK = DecideSizes(prompt_tokens=2_000, prefill_workers=2, decode_workers=2, runs=3)


class _Stub(StubWorker):
    def info(self) -> cluster_pb2.WorkerInfo:
        info = super().info()
        info.total_blocks = TOTAL_BLOCKS
        return info

    def _load(self) -> None:  # type: ignore[override]  # reports no load, so the directory's values are used
        return None


def figures(sizes: DecideSizes) -> Iterator[Figure]:
    prompt = random_prompt(sizes.prompt_tokens, VOCAB)
    hash_ms = [_hash_ms(prompt) for _ in range(sizes.runs)]
    decide_ms = asyncio.run(_decisions(prompt, sizes))
    yield Figure("router.decide_100k_ms", round(statistics.median(decide_ms), 3), "ms")
    yield Figure("router.hash_100k_ms", round(statistics.median(hash_ms), 2), "ms")


def _hash_ms(prompt: list[int]) -> float:
    began_s = time.perf_counter()
    hash_blocks(prompt, BLOCK_TOKENS, HashKey("bench"))
    return 1000 * (time.perf_counter() - began_s)


async def _decisions(prompt: list[int], sizes: DecideSizes) -> list[float]:
    """Every worker holds a prefix of a different length, so the look-up must follow each one to its end."""
    controller = StubController()
    await controller.start()
    roles = [Role.PREFILL] * sizes.prefill_workers + [Role.DECODE] * sizes.decode_workers
    stubs = [_Stub(f"{role.value}-{number}", role, MODEL) for number, role in enumerate(roles)]
    for stub in stubs:
        await stub.start()
    with tempfile.TemporaryDirectory() as folder:
        app = RouterApp(_launch(Path(folder), controller.address))
        await app.start()
        try:
            await controller.set_workers(*stubs)
            fleet = app.dispatcher.fleet
            await until(lambda: fleet.count_ready(Role.PREFILL) + fleet.count_ready(Role.DECODE) == len(stubs), 30.0)
            hashes = hash_blocks(prompt, BLOCK_TOKENS, HashKey("bench"))
            dice = np.random.default_rng(1)
            for number, stub in enumerate(stubs, start=1):
                held = join_hashes(hashes[: number * len(hashes) // len(stubs)])
                filler = dice.bytes(HASH_BYTES * FILLER_BLOCKS)
                app.mirror.load(stub.worker_id, PrefixSnapshot(1, 0, held + filler))
            return [_decide_ms(app, prompt, hashes) for _ in range(sizes.runs)]
        finally:
            await app.close()
            for stub in stubs:
                await stub.kill()
            await controller.stop()


def _launch(folder: Path, controller: str) -> RouterLaunch:
    model_dir = write_tiny_llama(folder / "model", vocab=VOCAB, max_positions=1 << 18)
    served = ServedModel(name=MODEL, model_dir=str(model_dir), model_fingerprint="bench", block_tokens=BLOCK_TOKENS)
    return RouterLaunch(
        cluster="bench",
        router_id="router-0",
        router=RouterSpec(http_port=0, grpc_port=0),
        models=(served,),
        controller_address=controller,
        redis_url=None,
    )


def _decide_ms(app: RouterApp, prompt: list[int], hashes: list[BlockHash]) -> float:
    fresh = tuple(bytes(bytearray(each)) for each in hashes)  # new objects, as in a real request
    request = ValidRequest(
        request_id="bench",
        model=MODEL,
        prompt=tuple(prompt),
        sampling=SamplingParams.parse(seed=1, max_tokens=64),
        stop=(),
        block_hashes=fresh,
        block_tokens=BLOCK_TOKENS,
    )
    assembler = OutputAssembler(app.service.models.by_name[MODEL].tokenizer, prompt, (), frozenset())
    run = RequestRun(request, assembler, RequestTerms("interactive"), time.monotonic(), max_migrations=0)
    began_s = time.perf_counter()
    placement = app.dispatcher.core.placer.decide(run)
    took_ms = 1000 * (time.perf_counter() - began_s)
    if not isinstance(placement, Placement):
        raise RuntimeError(f"expected a placement, got {placement}")
    return took_ms
