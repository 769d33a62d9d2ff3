"""The command that fits drafters, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.training.kinds import Kind

# ruff: noqa: PLC0415 (importing torch takes seconds)


def add_to(app: typer.Typer) -> None:
    app.command("train-heads")(train_heads)


def train_heads(
    kind: Annotated[Kind, typer.Argument(help="medusa, early_exit, or eagle3.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the result.")],
    model: Annotated[
        str | None, typer.Option(help="Pulled model, checkpoint folder or GGUF file. Default: the demo model.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with a prompt in each line; default: the model asks itself.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, max=16, help="Medusa: how many tokens ahead.", show_default="4")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=1, help="Early exit: after how many layers; default: a quarter of them.")
    ] = None,
    vocabulary: Annotated[
        int,
        typer.Option(min=16, help="Drafts have only so many of the most frequent tokens, which makes them cheaper."),
    ] = 8192,
    tokens: Annotated[int, typer.Option(min=100, help="Tokens of the model's own answers to fit to.")] = 100_000,
    passes: Annotated[int, typer.Option(min=1, help="Passes over these.")] = 4,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions and answers.")] = 0,
) -> None:
    """Fit a drafter to a model's answers, for engine.speculation. Medusa heads, an early exit or an EAGLE-3 head."""
    from cluster.cli.commands.train_heads import Training, run_train_heads

    flags = Training(kind, model, output, prompts, heads, layer, vocabulary, tokens, passes, device, threads, seed)
    raise typer.Exit(run_train_heads(flags))
