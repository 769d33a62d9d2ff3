"""An EAGLE-3 head drafts what plain torch says, also from KV that it did not compute a step before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tandem.engine.factory import Rank
from tandem.engine.kv_pool import KvPool
from tandem.engine.loop.flight import Flight
from tandem.engine.step import Drafted, SequenceStep
from tandem.errors import RequestFailed
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EngineDriver, Exported, answer_that_moves, make_request
from tandem.testing.models import random_prompt, write_tiny_eagle

VOCAB = 300
SHORT = SamplingParams(temperature=0.0, max_tokens=12)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


def eagle_by_hand(folder: Path, rank: Rank, tokens: list[int], count: int, unknown: set[int]) -> list[int]:
    """What an EAGLE-3 head drafts after `tokens`, whose last one the model has not computed, in plain torch. `unknown`:
    positions with a key and a value of zero, besides the first."""
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    rows, entered = len(tokens) - 1, list[torch.Tensor]()
    step = SequenceStep(tokens[:-1], 0, [*range(-(-rows // 16))], samples=0)
    with torch.inference_mode():
        rank.model.hidden(
            torch.tensor(tokens[:-1]),
            torch.arange(rows),
            rank.runner.attention_over(KvPool(replace(rank.layout, num_blocks=64), torch.device("cpu")), [step]),
            entered=lambda layer, hidden: entered.append(hidden.double()),
        )
        states = torch.cat([entered[0]] * 3, dim=1) @ w["fc.weight"].T
        keys, values = [torch.zeros(2, 16, dtype=torch.float64)], [torch.zeros(2, 16, dtype=torch.float64)]
        drafted, hidden = list[int](), states[0]
        for position in range(1, len(tokens) + count - 1):
            token = (tokens + drafted)[position]
            state = states[position - 1] if position < len(tokens) else hidden
            hidden, key, value = eagle_row(
                w, rank.model.embedded(torch.tensor([token]))[0].double(), state, position, keys, values
            )
            keys.append(torch.zeros_like(key) if position in unknown else key)
            values.append(torch.zeros_like(value) if position in unknown else value)
            if position >= len(tokens) - 1:
                row = int((w["lm_head.weight"] @ rms(hidden, w["norm.weight"])).argmax())
                drafted.append(row + int(w["d2t"][row]))
    return drafted


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def eagle_row(
    w: dict[str, torch.Tensor],
    embedded: torch.Tensor,
    state: torch.Tensor,
    position: int,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def part(name: str) -> torch.Tensor:
        return w[f"midlayer.{name}.weight"]

    x = torch.cat((rms(embedded, part("input_layernorm")), rms(state, part("hidden_norm"))))
    q, k, v = ((part(f"self_attn.{name}_proj") @ x).view(-1, 16) for name in ("q", "k", "v"))
    q, k = (turned(each, position) for each in (q, k))
    every_k, every_v = torch.stack([*keys, k]), torch.stack([*values, v])  # [positions, 2, 16]
    heads = []
    for head, query in enumerate(q):
        chances = (every_k[:, head // 2] @ query / 4).softmax(dim=0)
        heads.append(chances @ every_v[:, head // 2])
    h = state + part("self_attn.o_proj") @ torch.cat(heads)
    normed = rms(h, part("post_attention_layernorm"))
    mlp = F.silu(part("mlp.gate_proj") @ normed) * (part("mlp.up_proj") @ normed)
    return h + part("mlp.down_proj") @ mlp, k, v


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    angles = position / 10000.0 ** (torch.arange(8, dtype=torch.float64) / 8)
    first, second = x[:, :8], x[:, 8:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=1
    )


class Watched:
    """An engine with an EAGLE-3 head, and what it drafted after which tokens of which request."""

    def __init__(self, make: Callable[..., Rank], model_dir: Path, folder: Path, **options: Any) -> None:
        self.head = folder if folder.exists() else write_tiny_eagle(folder, model_dir)
        head = {"speculation": "eagle3", "speculation_model": str(self.head), "speculation_adaptive": False}
        self.rank = make(**head | options)
        self.driver = EngineDriver(self.rank.engine)
        self.seen: list[tuple[str, list[int], tuple[int, ...]]] = []
        launcher = self.rank.engine._launcher
        self._taken = launcher._take_drafted
        launcher._take_drafted = self._take  # type: ignore[method-assign]

    def _take(self, flight: Flight, drafted: list[Drafted]) -> None:
        for chunk, found in zip(flight.plan.chunks, drafted, strict=True):
            self.seen.append((chunk.sequence.request_id, list(chunk.sequence.tokens), found.tokens))
        self._taken(flight, drafted)

    def agrees(self, request_id: str, unknown: set[int]) -> None:
        seen = [(before, tokens) for each, before, tokens in self.seen if each == request_id and tokens]
        assert len(seen) > 3
        for before, tokens in seen:
            assert list(tokens) == eagle_by_hand(self.head, self.rank, before, len(tokens), unknown)


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}], ids=["at ease", "prompt in pieces"])
def test_an_eagle_head_drafts_what_plain_torch_says(
    make: Callable[..., Rank], model_dir: Path, tmp_path: Path, options: Any
) -> None:
    watched = Watched(make, model_dir, tmp_path / "head", **options)
    for length in (3, 40):
        watched.driver.add(str(length), prompt(length), SHORT)
    watched.driver.run()
    watched.agrees("3", set())
    watched.agrees("40", set())


def test_an_eagle_head_knows_a_prompt_that_another_worker_computed(
    make: Callable[..., Rank], model_dir: Path, tmp_path: Path
) -> None:
    exported = Exported()
    source, target = (Watched(make, model_dir, tmp_path / "head", **more) for more in ({"exporter": exported}, {}))
    request = make_request("r", prompt(40), SHORT)
    answer_that_moves(source.rank, exported, (source.driver, target.driver), target.rank, request, 1)
    target.agrees("r", {40})


def test_an_eagle_head_knows_a_cached_prefix(make: Callable[..., Rank], model_dir: Path, tmp_path: Path) -> None:
    watched = Watched(make, model_dir, tmp_path / "head")
    watched.driver.add("first", prompt(40), SHORT)
    watched.driver.run()
    watched.driver.add("second", [*prompt(40), *prompt(9)], SHORT)
    watched.driver.run()
    watched.agrees("second", {32})  # two blocks were found


def test_an_eagle_head_knows_tokens_of_steps_in_which_there_was_no_room_to_draft(
    make: Callable[..., Rank], model_dir: Path, tmp_path: Path
) -> None:
    watched = Watched(make, model_dir, tmp_path / "head", max_step_tokens=16)
    watched.driver.add("r", prompt(20), replace(SHORT, max_tokens=40))
    for _ in range(4):
        watched.driver.take(watched.rank.engine.step())
    before = len(watched.driver.tokens["r"])
    watched.driver.add("long", prompt(150), SHORT)
    watched.driver.run()
    assert (
        max((len(tokens) for each, tokens, drafted in watched.seen if each == "r" and drafted), default=0)
        > 20 + before + 8
    )
    watched.agrees("r", set())


def test_a_request_that_fails_a_step_ends_alone_beside_drafts(
    make: Callable[..., Rank], model_dir: Path, tmp_path: Path
) -> None:
    watched = Watched(make, model_dir, tmp_path / "head")
    hidden = watched.rank.model.hidden

    def fails(tokens: torch.Tensor, positions: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        if (positions == 45).any():
            raise ValueError("no")
        return hidden(tokens, positions, *others, **more)

    watched.rank.model.hidden = fails  # type: ignore[method-assign, assignment]
    for length in (5, 20, 38):
        watched.driver.add(str(length), prompt(length), SHORT)
    watched.driver.run()
    assert isinstance(watched.driver.ends.pop("38"), RequestFailed)
    assert watched.driver.ends == {"5": FinishReason.LENGTH, "20": FinishReason.LENGTH}
    assert watched.driver.at_rest()
