"""A tiny model, engines on it, and the reference: `transformers` on the same checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.blockhash import HashKey
from tandem.config import EngineSpec
from tandem.engine.api import EngineRequest, ExportRange, StepResult
from tandem.engine.engine import Engine
from tandem.engine.factory import Rank, build_rank
from tandem.errors import TandemError
from tandem.request import SamplingParams
from tandem.sampling.sampler import choose
from tandem.testing import write_tiny_llama

VOCAB = 300
CLEAR = 1e-3  # by how much a best logit must lead for an fp32 test to rest on it


class NoExport:
    """An exporter nobody listens to."""

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        """Nothing to do."""

    def layer_done(self, layer: int) -> None:
        """Nothing to do."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, kv_heads=2, heads=4, seed=1)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(f"{length}/{seed}")
    return tuple(dice.randrange(VOCAB) for _ in range(length))


def expected_tokens(model: LlamaForCausalLM, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The reference's tokens: its logits, our sampler. Refuses to rest on a near tie."""
    tokens = list(prompt)
    past = None
    with torch.inference_mode():
        for _ in range(sampling.max_tokens):
            feed = tokens if past is None else tokens[-1:]
            out = model(torch.tensor([feed]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            row = out.logits[0, -1]
            best = row.topk(2).values
            assert best[0] - best[1] > CLEAR, "near tie: choose another prompt or model"
            tokens.append(choose(row.numpy(), sampling, len(tokens)).token_id)
            if tokens[-1] in sampling.stop_token_ids:
                break
    return tokens[len(prompt) :]


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def request(
    name: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **options: object
) -> EngineRequest:
    chosen = sampling or greedy()
    return EngineRequest(name, tuple(prompt), chosen, HashKey("model"), **options)  # type: ignore[arg-type]


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(model_dir: Path, tmp_path: Path) -> MakeRank:
    def make(exporter: object | None = None, **spec: object) -> Rank:
        settings = {"kv_blocks": 64} | spec
        return build_rank(
            model_dir,
            EngineSpec(**settings),  # type: ignore[arg-type]
            rank=0,
            size=1,
            rendezvous_file=tmp_path / "rendezvous",
            exporter=exporter or NoExport(),  # type: ignore[arg-type]
        )

    return make


class Driver:
    """Steps an engine and sorts what comes out by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, object] = {}
        self.cached: dict[str, int] = {}

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.take(self.engine.step())
        raise TandemError("the engine did not come to rest")

    def take(self, result: StepResult) -> None:
        for token in result.tokens:
            self.tokens.setdefault(token.request_id, []).append(token.token_id)
            if token.cached_tokens is not None:
                self.cached[token.request_id] = token.cached_tokens
        for end in result.ended:
            self.ends[end.request_id] = end.error or end.reason


def assert_at_rest(engine: Engine) -> None:
    blocks = engine.load().blocks
    assert blocks.conserved
    assert (blocks.leased, blocks.in_use) == (0, 0)
