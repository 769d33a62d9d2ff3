"""`tandem train-heads`: fits Medusa heads, an early exit or an EAGLE-3 head to a model's own answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from cluster.profiling.measured import build_alone
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import resolve
from tandem.config.engine import EngineSpec
from tandem.config.model import DEMO_MODEL
from tandem.engine.drafts.eagle import has_none, usual_taps
from tandem.errors import ConfigError, InputError
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.text.words import plural
from tandem.training import eagle, fitting
from tandem.training.hidden_states import states_of, tapped
from tandem.training.kinds import Kind
from tandem.training.own_answers import BATCH, LONGEST_ANSWER, LONGEST_QUESTION, Answer, OwnAnswers

DEFAULT_HEADS = 4
TELL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Training:
    kind: Kind
    model: str | None
    output: Path
    prompts: Path | None
    heads: int | None
    layer: int | None
    vocabulary: int
    tokens: int
    passes: int
    device: str
    threads: int
    seed: int


def run_train_heads(flags: Training) -> int:
    """Raises ConfigError, CheckpointError, InputError."""
    console = Console(stderr=True, highlight=False)
    folder = resolve(flags.model or DEMO_MODEL, progress=console.print)
    config = ModelConfig.load(folder)
    layer, heads = _layer(flags, config), _number_of_heads(flags)
    if flags.kind is Kind.EAGLE3 and (why := has_none(config)) is not None:
        raise InputError(f"--model: {why}", field="model")
    prompts = _prompts(flags.prompts)
    _make_empty(flags.output)
    with build_alone(folder, _engine(flags)) as rank:
        asked = OwnAnswers(rank, Tokenizer.load(folder), ChatTemplate.load(folder), prompts, flags.seed)
        answers = asked.take(flags.tokens, lambda had: console.print(f"{had} of {flags.tokens} tokens answered"))
    if flags.kind is Kind.EAGLE3:
        _eagle(flags, folder, config, answers, console)
    else:
        _heads(flags, folder, config, answers, layer, heads, console)
    console.print(
        f"written; use it with engine.speculation={flags.kind} engine.speculation_model={flags.output.resolve()}"
    )
    return 0


def _eagle(flags: Training, folder: Path, config: ModelConfig, answers: list[Answer], console: Console) -> None:
    with build_alone(folder, _engine(flags, exact=True)) as rank:
        states = tapped(rank, answers, usual_taps(config.layers), _told(len(answers), console))
        every = torch.arange(config.vocab_size, device=rank.pool.tensor.device)
        embedding = rank.model.embedded(every).float().cpu()
    torch.set_num_threads(flags.threads)
    chosen = torch.tensor([token for answer in answers for token in answer.tokens[answer.begin :]])
    vocabulary = fitting.frequent(folder, config, chosen, flags.vocabulary)
    head = eagle.begun(folder, config, vocabulary)
    tensors = eagle.fit_eagle(head, answers, states, embedding, vocabulary, flags.passes, console.print)
    eagle.write_eagle(flags.output, tensors, folder, vocabulary, config)


def _heads(
    flags: Training, folder: Path, config: ModelConfig, answers: list[Answer], layer: int, heads: int, console: Console
) -> None:
    with build_alone(folder, _engine(flags, exact=True)) as rank:
        early = layer if flags.kind is Kind.EARLY_EXIT else None
        states = states_of(rank, answers, heads + 1, early, _told(len(answers), console))
    torch.set_num_threads(flags.threads)
    vocabulary = fitting.frequent(folder, config, states.chosen, flags.vocabulary)
    if flags.kind is Kind.MEDUSA:
        tensors = fitting.fit_medusa(states, vocabulary, heads, flags.passes, console.print)
        fitting.write_medusa(flags.output, tensors, heads, vocabulary)
    else:
        norm = fitting.last_norm(folder, config)
        tensors = fitting.fit_exit(states, vocabulary, norm, config.rms_norm_eps, flags.passes, console.print)
        fitting.write_exit(flags.output, tensors, layer, vocabulary)


def _told(total: int, console: Console) -> Callable[[int], None]:
    """Prints now and then how many answers' hidden states are computed, and how long the others take."""
    began_s = told_s = time.monotonic()
    console.print(f"computing hidden states of {plural(total, 'answer')}")

    def tell(done: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= TELL_EVERY_S and done < total:
            told_s = now_s
            console.print(f"{done} of {total} done, about {(now_s - began_s) / done * (total - done):.0f} s left")

    return tell


def _engine(flags: Training, *, exact: bool = False) -> EngineSpec:
    """Answers may come from quantised weights, as they will where the drafter is used; hidden states are exact."""
    on_cpu = flags.device == "cpu"
    longest = LONGEST_QUESTION + LONGEST_ANSWER
    return EngineSpec(
        device=flags.device,
        dtype="float32" if on_cpu else "bfloat16",
        weights="int8" if on_cpu and not exact else "dense",
        threads_per_rank=flags.threads,
        max_running_requests=BATCH,
        kv_memory_bytes=None if not on_cpu else (1 << 30),
        max_step_tokens=max(512, longest),
    )


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--output: expected a folder to write to, got: {error}", field="output") from error
    if not is_empty:
        raise ConfigError(f"--output: expected a new or an empty folder, got {folder}", field="output")


def _layer(flags: Training, config: ModelConfig) -> int:
    """0 for others, which need none."""
    if flags.kind is not Kind.EARLY_EXIT:
        if flags.layer is not None:
            raise InputError("--layer: is for early_exit", field="layer")
        return 0
    layer = flags.layer or max(1, config.layers // 4)
    if layer >= config.layers:
        raise InputError(f"--layer: expected fewer than the model's {config.layers} layers, got {layer}", field="layer")
    return layer


def _number_of_heads(flags: Training) -> int:
    """0 for others than Medusa."""
    if flags.kind is Kind.MEDUSA:
        return DEFAULT_HEADS if flags.heads is None else flags.heads
    if flags.heads is not None:
        raise InputError("--heads: is for medusa", field="heads")
    return 0


def _prompts(file: Path | None) -> list[str]:
    """One in each line."""
    if file is None:
        return []
    try:
        found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts: expected a file of UTF-8 text, got: {error}", field="prompts") from error
    if not found:
        raise InputError(f"--prompts: expected a prompt in each line of {file}, found none", field="prompts")
    return found
