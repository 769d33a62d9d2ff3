"""What of a trace fits into a model's context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.traces.trace import TrafficTrace
from tandem.errors import InputError


def too_long(trace: TrafficTrace, context_tokens: int) -> int:
    """Prompts that a worker refuses, because they leave no room for an answer."""
    return int((trace.prompt_tokens >= context_tokens).sum())


def check_context(trace: TrafficTrace, context_tokens: int) -> None:
    """Raises InputError if no request can be served."""
    if too_long(trace, context_tokens) == len(trace):
        raise InputError(
            f"{trace.name}: expected prompts of fewer than {context_tokens:,} tokens, the context, got at least "
            f"{int(trace.prompt_tokens.min()):,} in each of {len(trace)}: all would be refused; choose a --model with "
            "a longer context, or raise engine.max_model_tokens if the spec sets it",
            field="trace",
        )


def within_context(trace: TrafficTrace, context_tokens: int) -> TrafficTrace:
    """With answers that end where the context does, and notes of what it cuts or has refused."""
    room = context_tokens - trace.prompt_tokens
    output_tokens = np.where(room > 0, np.minimum(trace.output_tokens, room), trace.output_tokens)
    if notes := tuple(_notes(trace, context_tokens, int((output_tokens < trace.output_tokens).sum()))):
        return replace(trace, output_tokens=output_tokens, notes=(*trace.notes, *notes))
    return trace


def _notes(trace: TrafficTrace, context_tokens: int, cut: int) -> Iterator[str]:
    if count := too_long(trace, context_tokens):
        yield (
            f"{count} of {len(trace)} prompts have {context_tokens:,} tokens or more, the whole context: workers "
            "refuse them"
        )
    if cut:
        yield f"{cut} of {len(trace)} answers are cut off at the context of {context_tokens:,} tokens"
