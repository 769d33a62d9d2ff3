"""Fits drafters to a model's own answers, and writes them in the formats that the engine reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.model_config import ModelConfig
from tandem.config.speculation_heads import HEAD_FILES
from tandem.errors import ConfigError
from tandem.model.checkpoint import Checkpoint
from tandem.training.hidden_states import States

HELD_OUT: Final = 0.05  # of the tokens, the last ones: acceptance is measured on them
ROWS: Final = 64  # in a step of fitting
RATE, HEAD_RATE = 1e-3, 3e-4  # of what begins at zero, and of projections, which begin as the model's own
WEIGHT_AHEAD: Final = 0.8  # of a head's loss, compared with that of the one before it (Medusa's)
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that drafts may have, the most frequent ones of the answers, and the rows of the model's own head."""

    ids: tuple[int, ...]
    head: Tensor  # [tokens, hidden]

    def places(self, chosen: Tensor) -> Tensor:
        """Token ids, some -1, to places in `ids`; -1: not there."""
        table = torch.full((max(self.ids) + 2,), -1, dtype=torch.int64)
        table[torch.tensor(self.ids)] = torch.arange(len(self.ids))
        known = torch.where(chosen < len(table) - 1, chosen, -1)
        return table[known]


def frequent(model_dir: Path, config: ModelConfig, chosen: Tensor, most: int) -> Vocabulary:
    """`chosen`: token ids of answers."""
    counts = torch.bincount(chosen[chosen >= 0], minlength=config.vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)[: min(most, config.vocab_size)]
    ids = sorted(order.tolist())
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    with Checkpoint.open(model_dir) as checkpoint:
        rows = checkpoint.read(name, [config.vocab_size, config.hidden_size])[ids].float()
    return Vocabulary(tuple(ids), rows)


def fit_medusa(states: States, vocabulary: Vocabulary, heads: int, passes: int, report: Report) -> dict[str, Tensor]:
    """Heads of one block each, and a projection that all share."""
    width = states.hidden.shape[1]
    weights = [torch.zeros(width, width, requires_grad=True) for _ in range(heads)]
    biases = [torch.zeros(width, requires_grad=True) for _ in range(heads)]
    head = vocabulary.head.clone().requires_grad_()
    hidden, targets = states.hidden.float().cpu(), vocabulary.places(states.chosen.cpu())

    def logits(number: int, x: Tensor) -> Tensor:
        return (x + F.silu(F.linear(x, weights[number], biases[number]))) @ head.T

    def loss(rows: Tensor) -> Tensor:
        each = [
            WEIGHT_AHEAD**number * cross_entropy(logits(number, hidden[rows]), targets[rows, number + 1])
            for number in range(heads)
        ]
        return torch.stack(each).sum()

    known = int(len(hidden) * (1 - HELD_OUT))
    descend(loss, [*weights, *biases], [head], known, passes, report)
    with torch.no_grad():
        for number in range(heads):
            right = logits(number, hidden[known:]).argmax(dim=1) == targets[known:, number + 1]
            there = states.chosen[known:, number + 1].cpu() >= 0
            report(f"head {number + 1}: {right[there].float().mean():.1%} right, of tokens not fitted to")
    tensors = {f"{number}.0.linear.weight": weights[number].detach() for number in range(heads)}
    tensors |= {f"{number}.0.linear.bias": biases[number].detach() for number in range(heads)}
    return tensors | {"lm_head.weight": head.detach()}


def last_norm(model_dir: Path, config: ModelConfig) -> Tensor:
    """[hidden], where an exit's own norm begins."""
    with Checkpoint.open(model_dir) as checkpoint:
        return checkpoint.read("model.norm.weight", [config.hidden_size]) + config.traits.norm_offset


def fit_exit(
    states: States, vocabulary: Vocabulary, norm: Tensor, eps: float, passes: int, report: Report
) -> dict[str, Tensor]:
    """A norm and a linear map after the exit, and a projection: they learn what the whole model makes of the tokens."""
    if states.early is None:
        raise ConfigError("expected hidden states after the exit's layer")
    width = states.hidden.shape[1]
    scale, linear = norm.float().cpu().clone().requires_grad_(), torch.zeros(width, width, requires_grad=True)
    head = vocabulary.head.clone().requires_grad_()
    early, hidden = states.early.float().cpu(), states.hidden.float().cpu()

    def logits(rows: Tensor) -> Tensor:
        normed = F.rms_norm(early[rows], [width], scale, eps)
        return (normed + F.linear(normed, linear)) @ head.T

    def loss(rows: Tensor) -> Tensor:
        whole = (hidden[rows] @ vocabulary.head.T).log_softmax(dim=1)
        return F.kl_div(logits(rows).log_softmax(dim=1), whole, log_target=True, reduction="batchmean")

    known = int(len(hidden) * (1 - HELD_OUT))
    descend(loss, [scale, linear], [head], known, passes, report)
    with torch.no_grad():
        rows = torch.arange(known, len(hidden))
        right = logits(rows).argmax(dim=1) == vocabulary.places(states.chosen[known:, 0].cpu())
        report(f"after the exit: {right.float().mean():.1%} right, of tokens not fitted to")
    return {"norm.weight": scale.detach(), "linear.weight": linear.detach(), "lm_head.weight": head.detach()}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the rows that have a target; zero without any."""
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / max(1, int((targets >= 0).sum()))


def descend(
    loss: Callable[[Tensor], Tensor],
    fresh: Sequence[Tensor],
    heads: Sequence[Tensor],
    count: int,
    passes: int,
    report: Report,
    rows: int = ROWS,
) -> None:
    """AdamW over `count` rows in a drawn order, `rows` in a step, with rates that fall like a cosine."""
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(
        [{"params": [*fresh], "lr": RATE}, {"params": [*heads], "lr": HEAD_RATE}], weight_decay=0.0
    )
    steps = passes * max(1, count // rows)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    )
    step, sum_of_pass = 0, 0.0
    for number in range(passes):
        order = torch.randperm(count, generator=draw)
        batches = [order[at : at + rows] for at in range(0, max(1, count - rows + 1), rows)]
        for some in batches:
            optimizer.zero_grad()
            value = loss(some)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            step, sum_of_pass = step + 1, sum_of_pass + float(value.detach())
        report(f"pass {number + 1} of {passes}: loss {sum_of_pass / len(batches):.3f}")
        sum_of_pass = 0.0


def write_medusa(folder: Path, tensors: dict[str, Tensor], heads: int, vocabulary: Vocabulary) -> None:
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1, "vocabulary": vocabulary.ids}
    write_parts(folder, HEAD_FILES["medusa"], tensors, config)


def write_exit(folder: Path, tensors: dict[str, Tensor], layer: int, vocabulary: Vocabulary) -> None:
    write_parts(folder, HEAD_FILES["early_exit"], tensors, {"exit_layer": layer, "vocabulary": vocabulary.ids})


def write_parts(folder: Path, file: str, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).chmod((folder / "config.json").stat().st_mode)  # else its owner alone could read it
