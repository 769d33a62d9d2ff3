"""What grammars allow after the tokens of a step: prepared while the model computes, taken when it has."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import numpy as np

from tandem.engine.allocation_failures import is_out_of_memory, leaves_device_unusable, lost_for_memory
from tandem.engine.loop.flight import Flight, first_samples
from tandem.engine.output import DeviceChoice
from tandem.errors import RequestFailed, TandemError
from tandem.grammar.compiler import Allowed
from tandem.grammar.masks import MASK_WAIT_S
from tandem.scheduler.plan import Chunk
from tandem.scheduler.sequence import Sequence


def prepare_masks(chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        if chunk.samples and chunk.sequence.grammar is not None:
            chunk.sequence.grammar.prepare(chunk.sequence.tokens, chunk.proposed)


def take_following(flight: Flight, *, found_only: bool = False) -> None:
    """Takes what grammars allow. Requests for which it is late, or which fail, are left out of the step's output:
    the late ones compute their last chunk again in the next step. `found_only`: only what is known by now, and none
    is late."""
    end_s = time.monotonic() + MASK_WAIT_S
    for chunk in flight.plan.chunks:
        sequence = chunk.sequence
        if not chunk.samples or sequence.grammar is None or sequence in flight.discarded:
            continue
        if sequence in flight.following or sequence in flight.failed:
            continue
        if found_only and not sequence.grammar.has_found(sequence.tokens):
            continue
        try:
            found = sequence.grammar.take(sequence.tokens, end_s - time.monotonic())
        except Exception as error:
            flight.failed[sequence] = error if isinstance(error, TandemError) else RequestFailed.by(error)
            continue
        if found is None:
            flight.discarded.add(sequence)
        else:
            flight.following[sequence] = found


def choose_on_device(flight: Flight, done: Collection[Sequence], vocab_size: int) -> DeviceChoice | None:
    """Lets the device choose among what grammars allow, where that is known, but for `done`. None: nothing is to
    choose."""
    if not flight.following or flight.launched is None:
        return None
    allowed: dict[int, Allowed] = {}
    sampling: dict[int, Sequence] = {}
    inputs = [each for each in flight.step.sequences if each.samples]
    for (chunk, sample), step in zip(first_samples(flight.plan), inputs, strict=True):
        sequence = sampling[sample] = chunk.sequence
        following = flight.following.get(sequence)
        if following is None or sequence in done or not step.masked:
            continue
        if not following.forced:
            assert following.allowed is not None
            allowed[sample] = following.allowed
        elif sequence.sampling.logprobs is not None:
            allowed[sample] = np.arange(vocab_size) == following.forced[0]
    if not allowed:
        return None
    try:
        return flight.launched.choose(allowed)
    except TandemError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise lost_for_memory(error) from error
        if leaves_device_unusable(error, on_device=True):
            raise
        flight.failed |= {sampling[sample]: RequestFailed.by(error) for sample in allowed}
        return None
