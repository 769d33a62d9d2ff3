"""What speculation gains on this CPU: the demo model's answers with it against those without, in turns.

    make bench-speculation
    python -m benchmarks.speculation --figure lookup --quick

Prints one JSON line per figure, as benchmarks/engine.py. `copy`: a quoted document and an edited file, greedy. `chat`:
questions with nothing to copy, half of them greedy and half sampled.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.handoff_figures import Figure
from tandem.checkpoint.model_store import pull
from tandem.config.spec import DEMO_MODEL
from tandem.engine.factory import Rank
from tandem.errors import InternalError
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.text.tokenizer import Tokenizer

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


@dataclass(frozen=True, slots=True)
class Sizes:
    copied: int = 90  # tokens
    written: int = 80
    runs: int = 5
    batch: int = 32


QUICK = Sizes(copied=6, written=4, runs=1, batch=3)


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: str
    temperature: float
    tokens: int


def answers(rank: Rank, tokenizer: Tokenizer, asked: list[Asked], *, together: bool) -> tuple[float, list[list[int]]]:
    """Seconds after the first tokens, and the tokens: of all in one batch, or one after the other."""
    if not together:
        each = [answers(rank, tokenizer, [one], together=True) for one in asked]
        return sum(seconds for seconds, _ in each), [tokens for _, (tokens,) in each]
    driver = EngineDriver(rank.engine)
    for number, one in enumerate(asked):
        sampling = SamplingParams(temperature=one.temperature, seed=number, max_tokens=one.tokens)
        driver.add(str(number), tokenizer.encode(one.prompt, add_special_tokens=False), sampling)
    while len(driver.tokens) < len(asked):
        driver.take(driver.engine.step())
    began_s = time.perf_counter()
    driver.run()
    return time.perf_counter() - began_s, [driver.tokens[str(number)] for number in range(len(asked))]


def measure_lookup(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """Speed over that without, medians of turns."""
    tokenizer = Tokenizer.load(model_dir)
    copies = [Asked(prompt, 0.0, sizes.copied) for prompt in COPIES]
    chats = [Asked(prompt, SAMPLED * (number % 2), sizes.written) for number, prompt in enumerate(CHATS)]
    many = [chats[number % len(chats)] for number in range(sizes.batch)]
    with tempfile.TemporaryDirectory() as folder:

        def rank(name: str, speculation: str) -> Rank:
            return single_rank(
                model_dir, Path(folder) / name, kv_blocks=4000, threads_per_rank=2, speculation=speculation
            )

        plain, ours = rank("plain", "none"), rank("ours", "lookup")
        for name, asked, together in (("copy_b1", copies, False), ("chat_b1", chats, False), ("chat_b32", many, True)):
            turns = [
                [answers(each, tokenizer, asked, together=together)[0] for each in (plain, ours)]
                for _ in range(sizes.runs)
            ]
            without, with_it = (statistics.median(each) for each in zip(*turns, strict=True))
            yield Figure(f"spec.lookup_{name}", with_it, "s", without, without / with_it)
        speculator = ours.engine.speculator
        if speculator is None:
            raise InternalError("engine.speculation: expected a speculator, got none")
        yield Figure("spec.lookup_acceptance", speculator.accepted / max(1, speculator.proposed), "share")


def measure_exactness(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """The share of answers that are equal, token for token, with `batch_invariant`: batches of 1, 8 and 32."""
    tokenizer = Tokenizer.load(model_dir)
    asked = [Asked(prompt, temperature, sizes.copied) for prompt in (*COPIES, *CHATS) for temperature in (0.0, SAMPLED)]
    equal = total = 0
    with tempfile.TemporaryDirectory() as folder:
        options = {"kv_blocks": 4000, "threads_per_rank": 2, "batch_invariant": True}
        ranks = [
            single_rank(model_dir, Path(folder) / name, None, None, speculation=name, **options)
            for name in ("none", "lookup")
        ]
        for batch in sorted({1, min(8, sizes.batch), sizes.batch}):
            batches = [asked[at : at + batch] for at in range(0, len(asked), batch)] if batch < len(asked) else [asked]
            for some in batches:
                (_, without), (_, with_it) = (answers(each, tokenizer, some, together=True) for each in ranks)
                equal += sum(one == other for one, other in zip(without, with_it, strict=True))
                total += len(some)
    yield Figure("spec.exact_share", equal / total, "share", 1.0, equal / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=["lookup", "exactness"])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    given = parser.parse_args()
    sizes, model_dir = QUICK if given.quick else Sizes(), pull(DEMO_MODEL)
    figures: dict[str, Callable[[Path, Sizes], Iterator[Figure]]] = {
        "lookup": measure_lookup,
        "exactness": measure_exactness,
    }
    for name, measure in figures.items():
        if given.figure in (None, name):
            for figure in measure(model_dir, sizes):
                print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
