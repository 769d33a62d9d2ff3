"""What speculation gains on this CPU: the demo model's answers with it against those without, in turns.

    make bench-speculation
    python -m benchmarks.speculation --figure lookup --quick

Prints one JSON line per figure, as benchmarks/engine.py. `copy`: a quoted document and an edited file, greedy. `chat`:
questions with nothing to copy, half of them greedy and half sampled.

`proposers` first fits Medusa heads and an early exit to the model's own answers, which takes a quarter of an hour, and
keeps them in the cache. Beside the speed of each stand its acceptance and its bound: the tokens that its steps gave,
for the bytes of weights that these and its drafts read.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks import batching
from benchmarks.engine_served import ServedPair
from benchmarks.handoff_figures import Figure
from cluster.cli.commands.train_heads import Training, run_train_heads
from cluster.cli.load.client import LoadRequest
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import pull
from tandem.config.model import DEMO_MODEL
from tandem.engine.api import StepResult
from tandem.engine.factory import Rank
from tandem.errors import InternalError
from tandem.files import cache_dir
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.text.tokenizer import Tokenizer
from tandem.training.kinds import Kind

DOCUMENT = """The history of the city began long before the first stone bridge was built across the river. Traders \
came from the south with salt and cloth, and farmers brought grain, cheese and wool from the hills. In the year 1241 \
the market received its charter, and from then on a fair was held every spring. The guild of weavers built a hall \
beside the church, whose tower was finished only after three generations of masons had worked on it.
"""
FILE = '''def add(first, second):
    """Returns the sum of two numbers."""
    return first + second

def subtract(first, second):
    """Returns the difference of two numbers."""
    return first - second

def multiply(first, second):
    """Returns the product of two numbers."""
    return first * second

def divide(first, second):
    """Returns the quotient of two numbers."""
    if second == 0:
        raise ZeroDivisionError("the second number must not be zero")
    return first / second
'''
EDITED = FILE.replace("first", "left")
# Of a small model that follows no such instruction: each text has begun.
COPIES = (
    f"Document:\n{DOCUMENT}\nThe document again, word for word:\n{DOCUMENT[:40]}",
    f"File:\n{FILE}\nThe file after renaming `first` to `left`:\n{EDITED[:150]}",
)
QUESTIONS = (
    "Write a short story about a fox.",
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "What should I cook tonight?",
    "Tell me about the history of Rome.",
    "Give me advice for learning to swim.",
    "How do ships float?",
    "What makes a good friend?",
)
CHATS = tuple(f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS)
SAMPLED = 0.7  # temperature
KV_BLOCKS = 768  # what 32 requests of the longest prompt and answer take

HEADS, BRANCHES, EXIT_LAYER, VOCABULARY = 4, 4, 6, 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    copied: int = 90  # tokens
    written: int = 80
    compared: int = 20
    runs: int = 5
    batch: int = 32
    streams: int = 16
    counted_s: float = 45.0
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    together: int = 60  # tokens
    turns: int = 3
    fitted: int = 60_000  # tokens of own answers
    passes: int = 4


QUICK = Sizes(
    copied=6,
    written=4,
    compared=4,
    runs=1,
    batch=3,
    streams=2,
    counted_s=2.0,
    batches=(1, 2),
    together=4,
    turns=1,
    fitted=100,
    passes=1,
)


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: str
    temperature: float
    tokens: int


@contextmanager
def rank_with(model_dir: Path, **settings: object) -> Iterator[Rank]:
    gc.collect()  # frees the pools of closed ones
    options: dict[str, object] = {"kv_blocks": KV_BLOCKS, "threads_per_rank": 2}
    with tempfile.TemporaryDirectory() as folder:
        rank = single_rank(model_dir, Path(folder) / "rendezvous", None, None, **options | settings)
        try:
            yield rank
        finally:
            rank.close()


@dataclass(slots=True)
class Batch:
    """Requests that an engine answers together."""

    driver: EngineDriver
    asked: Sequence[Asked]
    seconds: float = 0.0  # after the first tokens
    count: int = 0  # tokens

    def begin(self, tokenizer: Tokenizer) -> None:
        """Until each has its first token."""
        for number, one in enumerate(self.asked):
            sampling = SamplingParams(temperature=one.temperature, seed=number, max_tokens=one.tokens)
            self.driver.add(str(number), tokenizer.encode(one.prompt, add_special_tokens=False), sampling)
        while len(self.driver.tokens) < len(self.asked):
            self.driver.take(self.driver.engine.step())

    def step(self) -> None:
        began_s = time.perf_counter()
        result = self.driver.engine.step()
        self.seconds += time.perf_counter() - began_s
        self.count += len(result.tokens)
        self.driver.take(result)


def answers(
    ranks: Sequence[Rank], tokenizer: Tokenizer, asked: Sequence[Asked], *, together: bool
) -> list[tuple[float, list[list[int]]]]:
    """Of each rank the seconds after the first tokens, and the tokens: of all in one batch, or one after the other. The
    rank with the fewest tokens makes the next step, so that all of them meet the machine at the same speed."""
    found = [(0.0, list[list[int]]()) for _ in ranks]
    for some in [asked] if together else [[one] for one in asked]:
        batches = [Batch(EngineDriver(rank.engine), some) for rank in ranks]
        for batch in batches:
            batch.begin(tokenizer)
        while left := [batch for batch in batches if batch.driver.engine.has_work]:
            min(left, key=lambda batch: batch.count).step()
        found = [
            (seconds + batch.seconds, tokens + [batch.driver.tokens[str(number)] for number in range(len(some))])
            for (seconds, tokens), batch in zip(found, batches, strict=True)
        ]
    return found


def speed(figure: str, turns: Sequence[Sequence[tuple[float, list[list[int]]]]]) -> Figure:
    """Of turns of one without and one with speculation: median seconds, and the median of the turns' ratios."""
    without, with_it = zip(*([seconds for seconds, _ in turn] for turn in turns), strict=True)
    ratios = [one / other for one, other in zip(without, with_it, strict=True)]
    return Figure(figure, statistics.median(with_it), "s", statistics.median(without), statistics.median(ratios))


def measure_lookup(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """Speed over that without, medians of turns."""
    tokenizer = Tokenizer.load(model_dir)
    copies = [Asked(prompt, 0.0, sizes.copied) for prompt in COPIES]
    chats = [Asked(prompt, SAMPLED * (number % 2), sizes.written) for number, prompt in enumerate(CHATS)]
    many = [chats[number % len(chats)] for number in range(sizes.batch)]
    with rank_with(model_dir) as plain, rank_with(model_dir, speculation="lookup") as ours:
        for name, asked, together in (("copy_b1", copies, False), ("chat_b1", chats, False), ("chat_b32", many, True)):
            turns = [answers((plain, ours), tokenizer, asked, together=together) for _ in range(sizes.runs)]
            yield speed(f"spec.lookup_{name}", turns)
        speculator = ours.engine.speculator
        if speculator is None:
            raise InternalError("engine.speculation: expected a speculator, got none")
        yield Figure("spec.lookup_acceptance", speculator.accepted / max(1, speculator.proposed), "share")


def measure_batches(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """Speed of `auto` over that without by batch, medians of turns; `mixed`: half of the requests copy. A batch of one:
    all texts, one after the other."""
    tokenizer = Tokenizer.load(model_dir)
    copies = [Asked(prompt, 0.0, sizes.together) for prompt in COPIES]
    chats = [Asked(prompt, SAMPLED * (number % 2), sizes.together) for number, prompt in enumerate(CHATS)]
    mixed = [each for pair in zip(copies * 4, chats, strict=True) for each in pair]
    with rank_with(model_dir) as plain, rank_with(model_dir, speculation="auto") as ours:
        for name, asked in {"copy": copies, "mixed": mixed, "chat": chats}.items():
            for batch in sizes.batches if name != "mixed" else sizes.batches[1:]:
                many = asked if batch == 1 else list(islice(cycle(asked), batch))
                turns = [answers((plain, ours), tokenizer, many, together=batch > 1) for _ in range(sizes.turns)]
                yield speed(f"spec.auto_{name}_b{batch}", turns)


def speculating(model_dir: Path, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """The settings of each proposer. The draft model is the model itself in int4: no smaller one has its vocabulary."""
    return {
        "lookup": {"speculation": "lookup"},
        "lookahead": {"speculation": "lookahead"},
        "draft": {"speculation": "draft", "speculation_weights": "int4"},
        "early_exit": {"speculation": "early_exit", "speculation_model": str(fitted(Kind.EARLY_EXIT, sizes))},
        "medusa": {"speculation": "medusa", "speculation_model": str(fitted(Kind.MEDUSA, sizes))},
        "medusa_tree": {
            "speculation": "medusa",
            "speculation_model": str(fitted(Kind.MEDUSA, sizes)),
            "speculation_branches": BRANCHES,
        },
        "eagle3": {"speculation": "eagle3", "speculation_model": str(fitted(Kind.EAGLE3, sizes))},
    }


def fitted(kind: Kind, sizes: Sizes) -> Path:
    folder = cache_dir() / "benchmarks" / f"{DEMO_MODEL}-{kind}-{sizes.fitted}-{sizes.passes}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            flags = Training(
                kind, DEMO_MODEL, Path(scratch) / "new", None,
                HEADS if kind is Kind.MEDUSA else None, EXIT_LAYER if kind is Kind.EARLY_EXIT else None,
                VOCABULARY, sizes.fitted, sizes.passes, "cpu", 2, seed=0,
            )  # fmt: skip
            run_train_heads(flags)
            folder.parent.mkdir(exist_ok=True)
            flags.output.rename(folder)
    return folder


def draft_share(name: str, config: ModelConfig) -> float:
    """Bytes of weights that a pass of drafting reads, over those of a step."""
    head = config.vocab_size * config.hidden_size
    heads = config.heads + 2 * config.kv_heads
    layer = config.hidden_size * (config.head_dim * (heads + config.heads) + 3 * config.intermediate_size)
    fitted_head, square = VOCABULARY * config.hidden_size, config.hidden_size**2
    bytes_read = {
        "lookahead": 0.0,
        "draft": 0.75 * config.layers * layer + head,  # groups of 32 with a scale and a minimum; an int8 head
        "early_exit": 4.0 * (EXIT_LAYER * layer + square + fitted_head),
        "medusa": 4.0 * (HEADS * square + fitted_head),
        "medusa_tree": 4.0 * (HEADS * square + fitted_head),
        "eagle3": 4.0 * (layer + config.hidden_size * config.head_dim * heads + fitted_head),
    }[name]
    return bytes_read / (4.0 * (config.layers * layer + head))


@dataclass(slots=True)
class Counted:
    """Steps of an engine, and passes that these drafted in."""

    rank: Rank
    steps: int = 0
    passes: int = 0

    def watch(self) -> None:
        step, drafter = self.rank.engine.step, self.rank.runner.drafter

        def counted() -> StepResult:
            if drafter is not None:
                drafter.passes = 0
            result = step()
            self.steps += 1
            self.passes += 0 if drafter is None else drafter.passes
            return result

        self.rank.engine.step = counted  # type: ignore[method-assign]


def measure_proposers(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """Speed on chat over that without, one request at a time, medians of turns."""
    tokenizer, config = Tokenizer.load(model_dir), ModelConfig.load(model_dir)
    chats = [Asked(prompt, SAMPLED * (number % 2), sizes.written) for number, prompt in enumerate(CHATS)]
    for name, settings in speculating(model_dir, sizes).items():
        if name == "lookup":
            continue
        with rank_with(model_dir) as plain, rank_with(model_dir, **settings) as ours:
            counted = Counted(ours)
            counted.watch()
            turns = [answers((plain, ours), tokenizer, chats, together=False) for _ in range(sizes.runs)]
            tokens = sum(len(answer) for turn in turns for answer in turn[1][1])
            speculator = ours.engine.speculator
            if speculator is None:
                raise InternalError("engine.speculation: expected a speculator, got none")
            yield speed(f"spec.{name}_b1", turns)
            yield Figure(f"spec.{name}_acceptance", speculator.accepted / max(1, speculator.proposed), "share")
            bytes_read = counted.steps + counted.passes * draft_share(name, config)
            yield Figure(f"spec.{name}_bound", tokens / bytes_read, "ratio")


def measure_exactness(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """The share of answers that are equal, token for token, with `batch_invariant`: batches of 1, 8 and 32, of all
    proposers, which propose as many tokens as they can."""
    tokenizer = Tokenizer.load(model_dir)
    temperatures = (0.0, SAMPLED, 0.4, 1.0)[: max(2, sizes.batch // 8)]
    asked = [Asked(prompt, each, sizes.compared) for prompt in (*COPIES, *CHATS) for each in temperatures]
    equal = total = 0
    batches = [
        asked[at : at + batch]
        for batch in sorted({1, min(8, sizes.batch), sizes.batch})
        for at in range(0, len(asked), batch)
    ]
    with rank_with(model_dir, batch_invariant=True) as plain:
        expected = [answers([plain], tokenizer, some, together=True)[0][1] for some in batches]
    for settings in speculating(model_dir, sizes).values():
        with rank_with(model_dir, batch_invariant=True, speculation_adaptive=False, **settings) as ours:
            for some, without in zip(batches, expected, strict=True):
                with_it = answers([ours], tokenizer, some, together=True)[0][1]
                equal += sum(one == other for one, other in zip(without, with_it, strict=True))
                total += len(some)
    yield Figure("spec.exact_share", equal / total, "share", 1.0, equal / total)


def measure_goodput(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """Answers per second whose tokens come within 1.25 times the median time of those without, of a pair of a prefill
    and a decode worker with 16 streams, each of which copies and chats in turn: `auto` over none, medians of turns.
    Each turn has its own such time, of the pair without. An answer counts by its part within `counted_s`, before which
    all streams have long begun."""
    tokenizer = Tokenizer.load(model_dir)

    def ask(number: int, text: str) -> LoadRequest:
        prompt = tokenizer.encode(f"Request {number}.\n{text}", add_special_tokens=False)
        return LoadRequest(prompt, sizes.copied)

    pairs = [(COPIES[number // 2 % 2], CHATS[number // 2 % 2]) for number in range(sizes.streams)]
    streams = [[ask(number, text) for text in pair[:: 1 - number % 2 * 2]] for number, pair in enumerate(pairs)]
    with (
        ServedPair(model_dir, 1, {"speculation": "none"}) as plain,
        ServedPair(model_dir, 1, {"speculation": "auto"}) as ours,
    ):
        for pair in (plain, ours):
            pair.times(streams, None)  # prompts are cached from here on

        def goodputs() -> tuple[float, float]:
            counted = [_counted(pair, streams, sizes.counted_s) for pair in (plain, ours)]
            pace_s = 1.25 * statistics.median(pace_s for pace_s, _ in counted[0])
            without, with_it = (sum(tokens for each_s, tokens in each if each_s <= pace_s) for each in counted)
            return without / sizes.copied / sizes.counted_s, with_it / sizes.copied / sizes.counted_s

        turns = [goodputs() for _ in range(sizes.runs)]
    without, with_it = (statistics.median(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(ours / plain for plain, ours in turns)
    yield Figure("spec.goodput_ratio", with_it, "requests/s", without, ratio)


def _counted(pair: ServedPair, streams: Sequence[Sequence[LoadRequest]], counted_s: float) -> list[tuple[float, int]]:
    """Of each answer the mean seconds between its tokens, and how many of them came within `counted_s`, before which
    the streams have a third of that to begin."""
    from_s = time.perf_counter() + counted_s / 3
    answered = [times for times in pair.times(streams, counted_s * 4 / 3) if times]
    counts = [(_pace_s(times), sum(at_s >= from_s for at_s in times)) for times in answered]
    return [each for each in counts if each[1]]


def _pace_s(times: Sequence[float]) -> float:
    """Mean seconds between an answer's tokens."""
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def measure_batching(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    return batching.measure_batching(model_dir, batching.QUICK if sizes is QUICK else batching.Sizes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=["lookup", "batches", "proposers", "goodput", "exactness", "batching"])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    given = parser.parse_args()
    sizes, model_dir = QUICK if given.quick else Sizes(), pull(DEMO_MODEL)
    figures: dict[str, Callable[[Path, Sizes], Iterator[Figure]]] = {
        "lookup": measure_lookup,
        "batches": measure_batches,
        "proposers": measure_proposers,
        "goodput": measure_goodput,
        "exactness": measure_exactness,
        "batching": measure_batching,
    }
    for name, measure in figures.items():
        if given.figure in (None, name):
            for figure in measure(model_dir, sizes):
                print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
