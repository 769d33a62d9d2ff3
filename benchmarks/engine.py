"""The engine's speed on this CPU, compared with the machine's limits and with other engines.

    make bench-engine
    python -m benchmarks.engine --figure decode --threads 1

Prints one JSON line per figure: {"figure", "value", "unit", "reference", "ratio"}. Limits and peers are measured in the
same run, alternating with Tandem. `scripts/engine-peers.sh` installs the peers; without them their lines have no
reference. docs/performance-method.md explains each figure.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine_experts import QUICK as QUICK_EXPERTS
from benchmarks.engine_experts import SIZES as EXPERTS
from benchmarks.engine_experts import ExpertSizes, expert_ratios
from benchmarks.engine_peers import EnginePeer, find_pair, find_peers
from benchmarks.engine_served import ServedPair
from benchmarks.handoff_figures import Figure
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import pull
from tandem.config.engine import EngineSpec
from tandem.config.model import DEMO_MODEL
from tandem.engine.attention.attention import StepAttention
from tandem.engine.factory import Rank, build_rank
from tandem.engine.kv_pool import DTYPES
from tandem.engine.output import best_of_any, launched
from tandem.engine.peaks import DevicePeaks, device_peaks
from tandem.engine.runner import ModelRunner
from tandem.engine.step import SequenceStep
from tandem.errors import InternalError
from tandem.kvcache.layout import KvPoolLayout, blocks_for
from tandem.model.matrices import MatrixMaker, Weights
from tandem.model.parallel import TensorParallel
from tandem.model.weights import load_model
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, NoExport, make_request
from tandem.testing.models import random_prompt, write_tiny_llama

T = TypeVar("T")
OVERHEAD_TARGET_MS = 1.0
TEXT = Path(__file__).with_name("perplexity.txt")


@dataclass(frozen=True, slots=True)
class EngineSizes:
    context: int = 256
    decode_steps: int = 12
    rounds: int = 5
    batches: tuple[int, ...] = (1, 8, 32)
    prefills: tuple[int, ...] = (512, 2048)
    kv_blocks: int = 1200
    streams: int = 16
    served_tokens: int = 64
    experts: ExpertSizes = EXPERTS


QUICK = EngineSizes(16, 2, 1, (1, 3), (24,), 64, 3, 24, QUICK_EXPERTS)


@dataclass(slots=True)
class EngineBench:
    """The engines to compare, each built at its first use, and the machine they share."""

    sizes: EngineSizes
    folder: Path
    scratch: Path
    threads: int
    peers: Mapping[str, EnginePeer]
    _ranks: dict[str, tuple[Rank, int]] = field(default_factory=dict)  # with torch's threads
    _names: Iterator[int] = field(default_factory=count)

    def rank(self, mode: str) -> Rank:
        """Returns the rank to measure next. Sets torch's number of threads, which is per process, for this mode."""
        rank, threads = self._rank_of(mode)
        torch.set_num_threads(threads)
        return rank

    def _rank_of(self, mode: str) -> tuple[Rank, int]:
        if mode not in self._ranks:
            self._ranks[mode] = self.new_rank(mode, kv_blocks=self.sizes.kv_blocks), torch.get_num_threads()
        return self._ranks[mode]

    @property
    def config(self) -> ModelConfig:
        return self._rank_of("fp32")[0].config

    def new_rank(self, mode: str, **options: object) -> Rank:
        defaults = {"threads_per_rank": self.threads, "max_step_tokens": 2048}
        spec = EngineSpec.model_validate({**defaults, **MODES[mode], **options})
        return build_rank(self.folder, spec, rank=0, size=1, rendezvous_file=self.scratch / mode, exporter=NoExport())

    def new_prompt(self, length: int) -> list[int]:
        """A new prompt each time, so no cache has it."""
        return random_prompt(length, self.config.vocab_size, 1000 + next(self._names))

    def known_prompts(self, batch: int) -> list[list[int]]:
        """The same prompts each time: after the first time both engines have them cached and soon decode."""
        return [random_prompt(self.sizes.context, self.config.vocab_size, number) for number in range(batch)]

    def tokenizer_ids(self, text: str) -> list[int]:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json")).encode(text).ids[: 4 * self.sizes.context]

    def peaks(self) -> DevicePeaks:
        return device_peaks(EngineSpec(threads_per_rank=self.threads))

    def weight_bytes(self, mode: str) -> float:
        """Bytes that one decode step reads: every matrix once."""
        config = self.config
        heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
        matrices = config.layers * config.hidden_size * (heads + 3 * config.intermediate_size)
        return (matrices + config.vocab_size * config.hidden_size) * (1.0 if mode == "int8" else 4.0)

    def prompt_flops(self, length: int) -> float:
        config = self.config
        heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
        products = length * config.hidden_size * (heads + 3 * config.intermediate_size)
        attention = length * length * config.heads * config.head_dim  # the causal half of both products
        return 2.0 * config.layers * (products + attention) + 2.0 * config.vocab_size * config.hidden_size


MODES: Mapping[str, Mapping[str, object]] = {
    "fp32": {},
    "int8": {"weights": "int8"},
    "int8_kv8": {"weights": "int8", "kv_dtype": "int8"},
    "int8_kvfp8": {"weights": "int8", "kv_dtype": "fp8"},
    "int4": {"weights": "int4"},
}
GPU_MODES = {
    "gpu_int8": (Weights.INT8, "float32"),
    "gpu_fp8": (Weights.FP8, "float32"),
    "gpu_fp8_kvfp8": (Weights.FP8, "float8_e4m3"),
}


def decode(bench: EngineBench) -> Iterator[Figure]:
    """Tokens per second of all requests together, each with a context of `context` tokens."""
    sizes = bench.sizes
    for batch in sizes.batches:
        ours: dict[str, list[float]] = {mode: [] for mode in MODES}
        theirs: dict[str, list[float]] = {name: [] for name in bench.peers}
        bandwidth: list[float] = []
        for number in range(sizes.rounds + 1):
            if number <= 1:  # the first round warms up
                ours, theirs, bandwidth = {mode: [] for mode in MODES}, {name: [] for name in bench.peers}, []
            for mode in MODES:
                step_s = _decode_step_s(bench, mode, bench.known_prompts(batch), sizes.decode_steps)
                ours[mode].append(batch / step_s)
            for name, peer in bench.peers.items():
                theirs[name].append(batch / peer.generate(bench.known_prompts(batch), sizes.decode_steps + 1).step_s)
            bandwidth.append(bench.peaks().memory_bytes_per_s)
        best = yield from _peers(f"engine.decode_b{batch}", theirs)
        for mode in MODES:  # int8, the fastest mode without loss of quality, has the plain name
            name = f"engine.decode_b{batch}" + ("" if mode == "int8" else f"_{mode}")
            yield _figure(name, statistics.median(ours[mode]), "tok/s", best)
        if batch == 1:
            for mode in ("fp32", "int8"):
                used = [rate * bench.weight_bytes(mode) / 1e9 for rate in ours[mode]]
                limit = statistics.median(bandwidth) / 2e9  # a copy reads and writes; a step reads
                yield _figure(f"engine.read_rate_b1_{mode}", statistics.median(used), "GB/s", limit)


def _decode_step_s(bench: EngineBench, mode: str, prompts: Sequence[list[int]], steps: int) -> float:
    """The median time of steps that only decode."""
    engine = bench.rank(mode).engine
    sampling = SamplingParams(temperature=0.0, max_tokens=steps + 2)
    for number, prompt in enumerate(prompts):
        engine.add(make_request(str(number), prompt, sampling))
    while engine.load().waiting_tokens:
        engine.step()
    took = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def prefill(bench: EngineBench) -> Iterator[Figure]:
    """Prompt tokens per second up to the first token."""
    for length in bench.sizes.prefills:
        ours: dict[str, list[float]] = {mode: [] for mode in MODES}
        theirs: dict[str, list[float]] = {name: [] for name in bench.peers}
        limit: list[float] = []
        for _ in range(bench.sizes.rounds):
            for mode in ("fp32", "int8"):
                ours[mode].append(length / _prefill_s(bench.rank(mode), bench.new_prompt(length)))
                limit.append(length * bench.peaks().flops_per_s / bench.prompt_flops(length))
            for name, peer in bench.peers.items():
                theirs[name].append(length / peer.generate([bench.new_prompt(length)], 1).first_s)
        best = yield from _peers(f"engine.prefill_{length}", theirs)
        yield _figure(f"engine.prefill_{length}", statistics.median(ours["int8"]), "tok/s", best)
        yield _figure(
            f"engine.prefill_{length}_fp32", statistics.median(ours["fp32"]), "tok/s", statistics.median(limit)
        )


def _peers(name: str, rates: Mapping[str, Sequence[float]]) -> Generator[Figure, None, float | None]:
    """Yields the figure of each peer and returns the best, the reference for Tandem."""
    medians = {peer: statistics.median(found) for peer, found in rates.items()}
    for peer, found in medians.items():
        yield _figure(f"{name}_{peer}", found, "tok/s", None)
    return max(medians.values(), default=None)


def _prefill_s(rank: Rank, prompt: list[int]) -> float:
    engine = rank.engine
    engine.add(make_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def restore(bench: EngineBench) -> Iterator[Figure]:
    """Time to first token of a prompt that another one evicted from the pool, restored from the host tier. Reference:
    computed again. The restore includes copying the blocks that it evicts itself."""
    length = bench.sizes.prefills[-1]
    blocks = length // 16 + 8
    rank = bench.new_rank("int8", kv_blocks=blocks, host_kv_memory_bytes=1 << 29)
    computed, found = [], []
    for _ in range(bench.sizes.rounds):
        first, second = bench.new_prompt(length + 1), bench.new_prompt(length + 1)
        computed += [_prefill_s(rank, first), _prefill_s(rank, second)]
        before = rank.engine.load().host.blocks_in
        found.append(_prefill_s(rank, first))
        if rank.engine.load().host.blocks_in - before < length // 16 - 8:
            raise InternalError("restore: expected the prompt in the host tier, got too few blocks from it")
    took, instead = (1e3 * statistics.median(each) for each in (found, computed))
    yield _figure(f"engine.restore_{length}_ms", took, "ms", instead)


def served(bench: EngineBench) -> Iterator[Figure]:
    """Streams through router, handoff and decode, compared with the same batch in a bare engine and in a vLLM pair."""
    sizes, modes = bench.sizes, ("int8", "int8_kvfp8")
    bare: dict[str, list[float]] = {mode: [] for mode in modes}
    ours: dict[str, list[float]] = {mode: [] for mode in modes}
    theirs: list[float] = []
    with ExitStack() as stack:
        pairs = {mode: stack.enter_context(ServedPair(bench.folder, bench.threads, MODES[mode])) for mode in modes}
        peer = find_pair(bench.threads, bench.folder) if bench.peers else None
        if peer is not None:
            stack.enter_context(peer)
        for _ in range(sizes.rounds):
            prompts = [bench.new_prompt(sizes.context) for _ in range(sizes.streams)]
            for mode, pair in pairs.items():
                bare[mode].append(sizes.streams / _decode_step_s(bench, mode, prompts, sizes.served_tokens))
                ours[mode].append(pair.rate(prompts, sizes.served_tokens))
            if peer is not None:
                theirs.append(sizes.streams / peer.generate(prompts, sizes.served_tokens).step_s)
    for mode in modes:
        name = f"engine.served_b{sizes.streams}" + ("" if mode == "int8" else f"_{mode}")
        rate = statistics.median(ours[mode])
        yield _figure(name, rate, "tok/s", statistics.median(bare[mode]))
        if theirs:
            yield _figure(f"{name}_beside_vllm", rate, "tok/s", statistics.median(theirs))


def overhead(bench: EngineBench) -> Iterator[Figure]:
    """A decode step of the largest batch without its inputs, the model and the logits: scheduling, sampling and
    bookkeeping."""
    batch = bench.sizes.batches[-1]
    rank = bench.rank("int8")
    engine = rank.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=bench.sizes.decode_steps * bench.sizes.rounds)
    for number, prompt in enumerate(bench.known_prompts(batch)):
        engine.add(make_request(str(number), prompt, sampling))
    while engine.load().waiting_tokens:
        engine.step()
    whole: list[float] = []
    inside: list[float] = []

    def timed(part: Callable[..., T], sign: int) -> Callable[..., T]:
        def run(*args: object, **options: object) -> T:
            began = time.perf_counter()
            output = part(*args, **options)
            inside[-1] += sign * (time.perf_counter() - began)
            return output

        return run

    with (
        patch.object(ModelRunner, "launch", timed(ModelRunner.launch, 1)),
        patch("tandem.engine.runner.best_of_any", timed(best_of_any, -1)),
        patch("tandem.engine.runner.launched", timed(launched, -1)),
    ):
        while engine.has_work:
            inside.append(0.0)
            began = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - began)
    left = [1e3 * (step - model) for step, model in zip(whole, inside, strict=True)]
    yield _figure("engine.step_overhead_ms", statistics.median(left), "ms", OVERHEAD_TARGET_MS)


def perplexity(bench: EngineBench) -> Iterator[Figure]:
    """Perplexity of the bundled text from the logprobs that clients can request. Reference: `transformers` in fp32."""
    ids = bench.tokenizer_ids(TEXT.read_text())
    expected = _expected_perplexity(bench.folder, ids)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for mode in MODES:
        driver = EngineDriver(bench.rank(mode).engine)
        driver.add("text", ids, sampling)
        driver.run()
        logprobs = [token.logprob for token in driver.scores["text"]]
        yield _figure(f"engine.perplexity_{mode}", math.exp(-statistics.fmean(logprobs)), "", expected)
    for mode, (weights, kv_dtype) in GPU_MODES.items():
        yield _figure(f"engine.perplexity_{mode}", _gpu_perplexity(bench.folder, ids, weights, kv_dtype), "", expected)


@torch.inference_mode()
def _gpu_perplexity(folder: Path, ids: list[int], weights: Weights, kv_dtype: str) -> float:
    """With a GPU's matrix products, which torch also computes on a CPU; all else in fp32."""
    config = ModelConfig.load(folder)
    model = load_model(folder, config, TensorParallel(), "cpu", torch.float32, matrix=MatrixMaker(weights))
    blocks = blocks_for(len(ids), 16)
    layout = KvPoolLayout(blocks, config.layers, config.kv_heads, 16, config.head_dim, kv_dtype)
    step = SequenceStep(token_ids=ids, start=0, blocks=list(range(blocks)), samples=1)
    attend = StepAttention(torch.zeros(layout.shape, dtype=DTYPES[kv_dtype]), layout, [step], model.attention)
    rows = torch.arange(len(ids))
    return _perplexity(model.forward(torch.tensor(ids), rows, rows[:-1], attend), ids)


def _expected_perplexity(folder: Path, ids: list[int]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # already in inference mode
    with torch.inference_mode():
        return _perplexity(model(torch.tensor([ids])).logits[0, :-1], ids)


def _perplexity(logits: Tensor, ids: list[int]) -> float:
    """logits [tokens - 1, vocab]"""
    logprobs = logits.double().log_softmax(dim=-1)
    return math.exp(-float(logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).mean()))


def moe(bench: EngineBench) -> Iterator[Figure]:
    """How many times as long as grouped experts the search for each expert's tokens takes, in one layer."""
    for name, ratio in expert_ratios(bench.sizes.experts, bench.threads, bench.sizes.rounds):
        yield _figure(f"engine.moe_{name}_ratio", ratio, "x", None)


def _figure(name: str, value: float, unit: str, reference: float | None) -> Figure:
    ratio = None if reference is None else round(value / reference, 4)
    return Figure(name, round(value, 4), unit, None if reference is None else round(reference, 4), ratio)


FIGURES: dict[str, Callable[[EngineBench], Iterator[Figure]]] = {
    "decode": decode,
    "prefill": prefill,
    "restore": restore,
    "served": served,
    "overhead": overhead,
    "perplexity": perplexity,
    "moe": moe,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--figure", action="append", choices=FIGURES, help="only these (may be repeated)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=EngineSizes().rounds)
    parser.add_argument("--batch", type=int, action="append", help="decode: only these batch sizes (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and no peers: checks only that it runs")
    options = parser.parse_args()
    options.batch = options.batch or EngineSizes().batches
    sizes = QUICK if options.quick else EngineSizes(rounds=options.rounds, batches=tuple(options.batch))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = write_tiny_llama(scratch / "tiny", vocab=300) if options.quick else pull(DEMO_MODEL)
        peers = {} if options.quick else find_peers(options.threads, folder)
        for peer in peers.values():
            stack.enter_context(peer)
        bench = EngineBench(sizes, folder, scratch, options.threads, peers)
        for name in options.figure or FIGURES:
            for figure in FIGURES[name](bench):
                print(figure.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
