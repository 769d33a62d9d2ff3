"""What constrained answers cost on this CPU.

    make bench-structured
    python -m benchmarks.structured --figure masks --quick

Prints one JSON line per figure, as benchmarks/engine.py. The schemas are those of Kubernetes' objects
(`kubernetes-validate`), with what they refer to.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from benchmarks.handoff_figures import Figure
from router.model_formats.events import CallEnded
from router.model_formats.parser import AnswerParser
from router.model_formats.reasoning import REASONINGS
from router.model_formats.registry import TOOL_FORMATS, Formats
from router.testing.call_writers import WRITERS
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import pull
from tandem.config.model import DEMO_MODEL
from tandem.errors import InputError, TandemError
from tandem.grammar.compiler import GrammarCompiler, Matcher
from tandem.grammar.constraint import Constraint, choice, json_schema, lark, regex
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tandem.text.tokenizer import Tokenizer

FORCED: dict[str, Any] = {  # about two thirds of an answer are forced
    "type": "object",
    "properties": {
        f"measured_value_of_the_sensor_number_{number}": {"type": "integer", "minimum": 10000, "maximum": 99999}
        for number in range(8)
    },
    "additionalProperties": False,
}
FORCED["required"] = [*FORCED["properties"]]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
        "kind": {"enum": ["private", "business"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
LONG_TEXT: dict[str, Any] = {"type": "string", "minLength": 2000, "maxLength": 4000}  # never ends while it is measured
COSTLY: dict[str, str] = {  # within all limits: many states, many tokens that may follow, or both
    "a late choice": regex("(.*a.{12}|.*b.{11}){1,9}", "regex").grammar,
    "much text": regex("[^\\x00]{1,2000}", "regex").grammar,
    "words": choice([f"{'word ' * (number % 16)}{number}" for number in range(1000)], "choice").grammar,
    "nested": lark('start: a\na: "(" a ")" a | /[a-z ]{0,40}/ | a a', "grammar").grammar,
}

TOOLS: dict[str, dict[str, Any]] = {
    "write_file": {"type": "object", "properties": {"content": {"type": "string"}}},
    "find": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}},
            "at": {"type": "object", "properties": {"lat": {"type": "number"}, "exact": {"type": "boolean"}}},
        },
    },
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"content": 'def f(x):\n    return {"a": [x], "b": x < 3}\n' * 20}),
    ("find", {"tags": ["a", "b c"] * 20, "at": {"lat": 41.9, "exact": True}}),
] * 4
TEXT = "The answer (with {braces}, [lists] and <b>marks</b>) goes on: 3 < 4, and so it does.\n" * 40
TOKEN_CHARS = 4
OWN_MARKS = {"gemma4": "gemma4", "granite": "granite", "kimi_k2": "kimi_k2", "mistral_args": "mistral"}  # of reasoning


@dataclass(frozen=True, slots=True)
class Sizes:
    schemas: int = 200
    tokens: int = 60  # of each schema's answer
    rows: int = 32
    steps: int = 60
    runs: int = 7
    answers: int = 60


QUICK = Sizes(schemas=5, tokens=8, rows=2, steps=3, runs=1, answers=2)


def real_schemas(most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of the newest Kubernetes, each with the definitions that it refers to."""
    root = files("kubernetes_validate").joinpath("kubernetes-json-schema")
    newest = max((each for each in root.iterdir() if each.name.endswith("-local-strict")), key=lambda each: each.name)
    definitions = json.loads(newest.joinpath("_definitions.json").read_text())["$defs"]
    names = sorted(definitions)
    random.Random(0).shuffle(names)
    for name in names[:most]:
        wanted, pending = {}, [name]
        while pending:
            if (each := pending.pop()) not in wanted:
                wanted[each] = definitions[each]
                pending += _referred(definitions[each])
        yield name, {"$ref": f"#/$defs/{name}", "$defs": wanted}


def _referred(value: object) -> list[str]:
    if isinstance(value, list):
        return [name for each in value for name in _referred(each)]
    if not isinstance(value, dict):
        return []
    own = value.get("$ref")
    inner = [name for key, each in value.items() if key != "$ref" for name in _referred(each)]
    return inner + ([own.rpartition("/")[2]] if isinstance(own, str) else [])


def measure_masks(compiler: GrammarCompiler, sizes: Sizes) -> Iterator[Figure]:
    """Of each grammar the compilation, and the masks of an answer that is drawn evenly from what is allowed."""
    compile_ms: list[float] = []
    mask_us: list[float] = []
    refused = 0
    ends = frozenset[int]()
    for number, (_, schema) in enumerate(real_schemas(3 * sizes.schemas)):
        if len(compile_ms) == sizes.schemas:
            break
        try:
            grammar = json_schema(schema, "schema").grammar
            began_s = time.perf_counter()
            matcher = compiler.compile(grammar)
        except InputError:
            refused += 1
            continue
        compile_ms.append(1e3 * (time.perf_counter() - began_s))
        mask_us += _masks_us(matcher, np.random.default_rng(number), sizes.tokens, ends)
    yield Figure("structured.schemas_refused", refused, "schemas")
    yield Figure("structured.compile_p50_ms", _percentile(compile_ms, 50), "ms", 5.0)
    yield Figure("structured.compile_p99_ms", _percentile(compile_ms, 99), "ms", 100.0)
    yield Figure("structured.mask_p50_us", _percentile(mask_us, 50), "us", 60.0)
    yield Figure("structured.mask_p99_us", _percentile(mask_us, 99), "us", 1000.0)


def _masks_us(matcher: Matcher, random_: np.random.Generator, tokens: int, ends: frozenset[int]) -> Iterator[float]:
    for _ in range(tokens):
        if matcher.is_complete:
            return
        token = matcher.forced()
        if token is None:
            began_s = time.perf_counter()
            allowed = matcher.allowed(ends)
            yield 1e6 * (time.perf_counter() - began_s)
            token = int(random_.choice(np.flatnonzero(allowed)))
        matcher.consume((token,))


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def measure_parser() -> Iterator[Figure]:
    """CPU time for each token of an answer with reasoning, text and calls, in the format that takes most."""
    costs = {format: _parse_us(format) for format in TOOL_FORMATS}
    worst = max(costs, key=costs.__getitem__)
    print(f"structured.parse_us_per_token: the worst format is {worst}", file=sys.stderr)
    yield Figure("structured.parse_us_per_token", costs[worst], "us", 5.0)


def _parse_us(format: str) -> float:
    """Of the fastest of five readings."""
    formats, answer = _answer_of(format)
    tokens = [answer[start : start + TOKEN_CHARS] for start in range(0, len(answer), TOKEN_CHARS)]
    took_s: list[float] = []
    for _ in range(5):
        parser = AnswerParser(formats, TOOLS)
        began_s = time.process_time()
        events = [event for token in tokens for event in parser.feed(token)] + parser.finish()
        took_s.append(time.process_time() - began_s)
        ended = sum(isinstance(event, CallEnded) for event in events)
        if ended != len(CALLS):
            raise RuntimeError(f"{format}: expected {len(CALLS)} calls, found {ended}")
    return 1e6 * min(took_s) / len(tokens)


def _answer_of(format: str) -> tuple[Formats, str]:
    calls = WRITERS[format](CALLS)
    tools = TOOL_FORMATS[format]
    if format == "harmony":
        parts = [f"<|channel|>{channel}<|message|>{TEXT}<|end|>" for channel in ("analysis", "commentary")]
        return Formats(tools), "<|start|>assistant".join([*parts, calls])
    reasoning = REASONINGS[OWN_MARKS.get(format, "deepseek_r1")]
    text = "" if tools.is_bare else TEXT
    return Formats(tools, reasoning), f"{reasoning.begin}\n{TEXT}\n{reasoning.end}\n{text}{calls}"


def measure_engine(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """`tpot_ratio_b32`: steps of constrained rows against steps of free ones, in turns. `forced_speedup`: an answer
    against itself with its forced tokens taken one by one. `valid_share`: of answers that ended by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        rank = single_rank(
            model_dir, Path(folder) / "rendezvous", kv_blocks=4000, threads_per_rank=2, max_running_requests=64
        )
        free = SamplingParams(temperature=0.7, seed=1, max_tokens=sizes.steps + 50)
        bound = replace(free, grammar=_grammar(LONG_TEXT))
        pairs = [(_step_ms(rank, free, sizes), _step_ms(rank, bound, sizes)) for _ in range(sizes.runs)]
        plain, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
        yield Figure("structured.tpot_ratio_b32", ours, "ms", plain, ours / plain)

        forced = SamplingParams(temperature=0.0, max_tokens=400, grammar=_grammar(FORCED))
        both = [(_answer_s(rank, forced), _answer_s(rank, replace(forced, logprobs=0))) for _ in range(sizes.runs)]
        chunked, one_by_one = (statistics.median(each) for each in zip(*both, strict=True))
        yield Figure("structured.forced_speedup", chunked, "s", one_by_one, one_by_one / chunked)

        config, tokenizer = ModelConfig.load(model_dir), Tokenizer.load(model_dir)
        ended = valid = 0
        driver = EngineDriver(rank.engine)
        for number in range(sizes.answers):
            sampling = SamplingParams(
                temperature=1.0 if number % 2 else 0.0,
                seed=number,
                max_tokens=300,
                stop_token_ids=frozenset(config.eos_token_ids),
                grammar=_grammar(PERSON),
            )
            driver.add(f"v{number}", tokenizer.encode(f"Person {number}: ", add_special_tokens=False), sampling)
        driver.run()
        for number in range(sizes.answers):
            if driver.ends[f"v{number}"] is FinishReason.STOP:
                ended += 1
                valid += _is_valid(tokenizer.decode(driver.tokens[f"v{number}"]), PERSON)
        yield Figure("structured.valid_share", valid / max(1, ended), "share", 1.0)
        yield Figure("structured.ended_share", ended / sizes.answers, "share")


def measure_neighbour(model_dir: Path, sizes: Sizes) -> Iterator[Figure]:
    """`beside_worst_p99_ms`: the longest steps (p99) of a free answer beside others with a costly grammar, against
    those beside free ones of the same lengths, in turns; of the worst of COSTLY."""
    with tempfile.TemporaryDirectory() as folder:
        rank = single_rank(model_dir, Path(folder) / "rendezvous", kv_blocks=4000, threads_per_rank=2)
        found: dict[str, tuple[float, float]] = {}
        for name, grammar in COSTLY.items():
            costly, plain = list[float](), list[float]()
            for _ in range(max(1, sizes.runs // 2)):
                took, lengths = _steps_beside_ms(rank, grammar, 2 * sizes.steps, [])
                costly += took
                plain += _steps_beside_ms(rank, None, 2 * sizes.steps, lengths)[0]
            found[name] = (_percentile(costly, 99), _percentile(plain, 99))
            print(f"structured.beside_worst_p99_ms: {name}: {found[name]}", file=sys.stderr)
        ours_ms, plain_ms = max(found.values(), key=lambda pair: pair[0] / pair[1])
        yield Figure("structured.beside_worst_p99_ms", ours_ms, "ms", plain_ms, ours_ms / plain_ms)


def _steps_beside_ms(rank: Any, grammar: str | None, steps: int, lengths: list[int]) -> tuple[list[float], list[int]]:
    """Steps of a free answer, and the lengths of the answers beside it, each of which begins when the last one ends.
    `lengths`: of those answers; empty: the grammar ends them."""
    driver = EngineDriver(rank.engine)
    free = SamplingParams(temperature=0.7, seed=1, max_tokens=steps + 2)
    driver.add("free", random_prompt(16, 1000), free)
    took, others = list[float](), 0
    while "free" not in driver.ends:
        if not others or f"other{others}" in driver.ends:
            most = lengths[others] if others < len(lengths) else free.max_tokens
            others += 1
            other = replace(free, seed=others, grammar=grammar, max_tokens=most)
            driver.add(f"other{others}", random_prompt(16, 1000, others), other)
        began_s = time.perf_counter()
        driver.take(rank.engine.step())
        took.append(1e3 * (time.perf_counter() - began_s))
    rank.engine.cancel(f"other{others}")
    failed = [end for end in driver.ends.values() if isinstance(end, TandemError)]
    if failed:
        print(f"structured.beside_worst_p99_ms: {len(failed)} answers failed: {failed[0]}", file=sys.stderr)
    return took, [max(1, len(driver.tokens.get(f"other{number}", ()))) for number in range(1, others + 1)]


def _grammar(schema: dict[str, Any]) -> str:
    constraint: Constraint = json_schema(schema, "schema")
    return constraint.grammar


def _step_ms(rank: Any, sampling: SamplingParams, sizes: Sizes) -> float:
    """The median of steps with all rows decoding."""
    driver = EngineDriver(rank.engine)
    for row in range(sizes.rows):
        driver.add(f"r{row}", random_prompt(16, 1000, row), replace(sampling, seed=row))
    while len(driver.tokens) < sizes.rows:
        driver.take(rank.engine.step())
    took: list[float] = []
    for _ in range(sizes.steps):
        began_s = time.perf_counter()
        driver.take(rank.engine.step())
        took.append(1e3 * (time.perf_counter() - began_s))
    for row in range(sizes.rows):
        rank.engine.cancel(f"r{row}")
    return statistics.median(took)


def _answer_s(rank: Any, sampling: SamplingParams) -> float:
    driver = EngineDriver(rank.engine)
    driver.add("a", random_prompt(16, 1000), sampling)
    began_s = time.perf_counter()
    driver.run()
    return time.perf_counter() - began_s


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=["masks", "parser", "engine", "neighbour"])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    given = parser.parse_args()
    sizes = QUICK if given.quick else Sizes()
    model_dir = pull(DEMO_MODEL)
    config = ModelConfig.load(model_dir)
    compiler = GrammarCompiler.load(model_dir, config.vocab_size, sorted(config.eos_token_ids))
    figures: dict[str, Callable[[], Iterator[Figure]]] = {
        "masks": lambda: measure_masks(compiler, sizes),
        "parser": measure_parser,
        "engine": lambda: measure_engine(model_dir, sizes),
        "neighbour": lambda: measure_neighbour(model_dir, sizes),
    }
    for name, measure in figures.items():
        if given.figure in (None, name):
            for figure in measure():
                print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
