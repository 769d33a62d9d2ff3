"""Shared by all tests: the reference that token-exactness is measured against."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.request import SamplingParams
from tandem.sampling.sampler import choose

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has SIGINT ignored, and every process they start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

CLEAR = 1e-3  # by how much a best logit must lead for an fp32 test to rest on it


class Reference:
    """Answers prompts in fp32, one token at a time: the logits of `transformers`, our sampler."""

    def __init__(self, model_dir: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Refuses to rest on a near tie, so that no test depends on the last bits of a sum."""
        tokens = list(prompt)
        past = None
        with torch.inference_mode():
            for _ in range(sampling.max_tokens):
                feed = torch.tensor([tokens if past is None else tokens[-1:]])
                out = self._model(feed, past_key_values=past, use_cache=True)
                past, row = out.past_key_values, out.logits[0, -1]
                best = row.topk(2).values
                if best[0] - best[1] < CLEAR:
                    raise ValueError(f"a near tie after {len(tokens)} tokens: choose another prompt or seed")
                tokens.append(choose(row.numpy(), sampling, len(tokens)).token_id)
                if tokens[-1] in sampling.stop_token_ids:
                    break
        return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def reference_for() -> Callable[[Path], Reference]:
    """The reference of a checkpoint; loaded once per checkpoint."""
    loaded: dict[Path, Reference] = {}

    def get(model_dir: Path) -> Reference:
        if model_dir not in loaded:
            loaded[model_dir] = Reference(model_dir)
        return loaded[model_dir]

    return get
