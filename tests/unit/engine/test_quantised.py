"""Quantised weights and KV, and the batch-invariant mode: the same tokens alone, in batches, in chunks, handed over and
migrated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.checkpoint.model_config import ModelConfig
from tandem.config.engine import EngineSpec
from tandem.engine.attention.kernels import choose_kernels
from tandem.engine.attention.native_attention import NativeStepAttention
from tandem.engine.factory import Rank
from tandem.engine.step import SequenceStep
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.kernel_check import checked_kernels
from tandem.model.matrices import MatrixMaker, Weights, quantised_int4, quantised_int8
from tandem.model.parallel import TensorParallel
from tandem.model.weights import load_model
from tandem.native.library import GROUP
from tandem.request import SamplingParams
from tandem.scheduler.plan import ExportRange
from tandem.testing.engine import EngineDriver, make_request, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.conftest import Reference, write_family

VOCAB = 320
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12)
MODES: dict[str, dict[str, Any]] = {
    "int8 weights": {"weights": "int8"},
    "int4 weights": {"weights": "int4"},
    "int8 KV": {"kv_dtype": "int8"},
    "fp8 KV": {"kv_dtype": "fp8"},
    "both": {"weights": "int8", "kv_dtype": "int8"},
    "fp32": {"batch_invariant": True},
}


class Exported:
    def __init__(self) -> None:
        self.ranges: list[ExportRange] = []

    def begin_step(self, ranges: Sequence[ExportRange]) -> None:
        self.ranges += ranges

    def layer_done(self, layer: int) -> None:
        """Blocks are copied at the end."""


SCORED = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
SEEDED_SCORED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, logprobs=0)
Scored = dict[str, list[tuple[int, float | None]]]


def scored(rank: Rank, prompts: dict[str, list[int]], names: Sequence[str]) -> Scored:
    """Tokens with their logprobs, which a difference in the last bit of a logit would change."""
    for name in names:
        sampling = SCORED if int(name) % 2 else SEEDED_SCORED
        rank.engine.add(make_request(name, prompts[name], sampling, use_prefix_cache=int(name) % 3 > 0))
    found: Scored = {name: [] for name in names}
    while rank.engine.has_work:
        for token in rank.engine.step().tokens:
            found[token.request_id].append((token.token_id, token.logprob))
    return found


def alone(rank: Rank, prompt: list[int], sampling: SamplingParams) -> list[int]:
    driver = EngineDriver(rank.engine)
    driver.add("r", prompt, sampling, use_prefix_cache=False)
    driver.run()
    return driver.tokens["r"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_every_family_answers_the_same_in_a_batch_in_chunks_handed_over_and_migrated(
    family_dir: Path, tmp_path: Path, mode: str
) -> None:
    invariant = {"batch_invariant": True} | MODES[mode]
    exported, prompts = Exported(), {str(n): random_prompt(n, VOCAB) for n in (5, 30, 100)}
    whole = single_rank(family_dir, tmp_path / "w", max_step_tokens=512, **invariant)
    expected = {name: alone(whole, prompt, SEEDED) for name, prompt in prompts.items()}

    sender = single_rank(family_dir, tmp_path / "p", exported, max_step_tokens=48, **invariant)
    receiver = single_rank(family_dir, tmp_path / "d", **invariant)
    prefill, decode = EngineDriver(sender.engine), EngineDriver(receiver.engine)
    reserved = {}
    for name, prompt in prompts.items():
        reserved[name] = decode.engine.reserve(make_request(name, prompt, SEEDED)).block_ids
        prefill.add(name, prompt, SEEDED, export_from_block=0)
    prefill.run()
    for each in exported.ranges:
        for logical, block in enumerate(each.block_ids, each.first_block):
            receiver.pool.tensor[reserved[each.request_id][logical]] = sender.pool.tensor[block]
    for name in prompts:
        prefill.engine.release_export(name)
        decode.engine.join(name, prefill.tokens[name][0])
    decode.run()
    assert {name: [*prefill.tokens[name], *decode.tokens[name]] for name in prompts} == expected

    said = 5  # before its worker was lost: now part of the prompt
    rest = replace(SEEDED, max_tokens=SEEDED.max_tokens - said)
    for name, prompt in prompts.items():
        prefill.add(f"{name} again", [*prompt, *expected[name][:said]], rest, answered_tokens=said)
    prefill.run()
    assert {name: prefill.tokens[f"{name} again"] for name in prompts} == {
        name: tokens[said:] for name, tokens in expected.items()
    }
    assert prefill.at_rest()
    assert decode.at_rest()


@pytest.mark.parametrize(
    "mode",
    [
        "both",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("fp32", "fp8 KV")),
        *(pytest.param(mode, marks=pytest.mark.soak_only) for mode in ("int8 weights", "int4 weights", "int8 KV")),
    ],
)
def test_200_prompts_answer_the_same_alone_in_batches_and_shuffled(tmp_path: Path, mode: str) -> None:
    """Wider than a tiny model usually is, so that products have tiles, panels and remainders."""
    folder = write_tiny_llama(tmp_path / "m", vocab=VOCAB, seed=1)
    draw = random.Random(5)
    prompts = {str(n): random_prompt(draw.randint(1, 60), VOCAB, n) for n in range(200)}
    rank = single_rank(folder, tmp_path / "r", kv_blocks=400, **({"batch_invariant": True} | MODES[mode]))
    expected: Scored = {}
    for name in prompts:
        expected |= scored(rank, prompts, [name])
    for _ in range(2):
        order = list(prompts)
        draw.shuffle(order)
        assert scored(rank, prompts, order) == expected


def logits(folder: Path, tp: TensorParallel, weights: Weights, *, by_torch: bool = False) -> Tensor:
    """[60, vocab] of one prompt. `by_torch`: products as on a GPU."""
    config, kernels = ModelConfig.load(folder), checked_kernels(1)
    matrix = MatrixMaker(weights, None if by_torch else kernels)
    model = load_model(folder, config, tp, "cpu", torch.float32, matrix=matrix)
    layout = KvPoolLayout(8, config.layers, config.rank_kv_heads(tp.size), 16, config.head_dim, "float32")
    prompt = random_prompt(60, VOCAB)
    step = SequenceStep(token_ids=prompt, start=0, blocks=[5, 2, 7, 1], samples=1)
    with torch.inference_mode():
        attend = NativeStepAttention(kernels, torch.zeros(layout.shape), layout, [step], model.attention)
        return model.forward(torch.tensor(prompt), torch.arange(60), torch.arange(60), attend)


@pytest.mark.parametrize("weights", [Weights.INT8, Weights.INT4])
def test_quantised_weights_are_the_same_whole_and_split_over_two_ranks(family_dir: Path, weights: Weights) -> None:
    whole = logits(family_dir, TensorParallel(), weights)
    assert not torch.equal(whole, logits(family_dir, TensorParallel(), Weights.DENSE))
    first, second = whole.topk(2).values.unbind(dim=-1)
    decided = first - second > 0.1  # twice what a logit may differ by
    assert decided.sum() > 50
    for each in split(family_dir, weights):
        torch.testing.assert_close(each, whole, atol=5e-2, rtol=2e-3)
        assert torch.equal(each.argmax(dim=-1)[decided], whole.argmax(dim=-1)[decided])


def split(folder: Path, weights: Weights, *, by_torch: bool = False) -> list[Tensor]:
    """The logits of each of two ranks."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank(number: int) -> Tensor:
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        tp = TensorParallel(number, 2, group)  # type: ignore[arg-type]
        return logits(folder, tp, weights, by_torch=by_torch)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize("weights", [Weights.INT8, Weights.FP8])
def test_eight_bits_of_a_gpu_split_over_two_ranks_differ_less_than_they_do_from_full_precision(
    tmp_path: Path, weights: Weights
) -> None:
    """Each rank quantises its own part of an input."""
    folder = write_family(tmp_path / "m", "llama")
    dense, whole = (logits(folder, TensorParallel(), each, by_torch=True) for each in (Weights.DENSE, weights))
    first, second = split(folder, weights, by_torch=True)
    assert torch.equal(first, second)
    assert 0 < (first - whole).norm() < 0.7 * (whole - dense).norm() < 0.4 * dense.norm()


def test_an_int8_product_is_that_of_the_widened_weights() -> None:
    weight, bias = torch.randn(70, 300), torch.randn(70)
    values, scales = quantised_int8(weight)
    assert (weight - values * scales[:, None]).abs().max() <= scales.max() / 2 + 1e-6
    x = torch.randn(9, 300)
    got = MatrixMaker(Weights.INT8, checked_kernels(1))(weight, bias)(x)
    torch.testing.assert_close(got, x @ (values * scales[:, None]).T + bias, atol=2e-3, rtol=1e-3)


def test_an_int4_product_is_that_of_the_widened_weights() -> None:
    weight, bias = torch.randn(70, 300), torch.randn(70)
    widened = widened_int4(weight)
    grouped = torch.cat((weight, weight[:, -1:].expand(-1, 20)), dim=1).view(70, -1, GROUP)
    steps = (grouped.amax(dim=2) - grouped.amin(dim=2)) / 15
    assert ((weight - widened).abs() <= 0.51 * steps.repeat_interleave(GROUP, dim=1)[:, :300]).all()
    x = torch.randn(9, 300)
    got = MatrixMaker(Weights.INT4, checked_kernels(1))(weight, bias)(x)
    torch.testing.assert_close(got, x @ widened.T + bias, atol=2e-3, rtol=1e-3)
    assert torch.equal(widened_int4(widened), widened)  # as the weights of a Q4_1 file


def test_weights_that_are_all_the_same_are_exact_in_int4() -> None:
    weight = torch.full((16, 64), 0.25)
    assert torch.equal(widened_int4(weight), weight)


def widened_int4(weight: Tensor) -> Tensor:
    values, scales, least = quantised_int4(weight)
    scales, least = (each.float().repeat_interleave(GROUP, dim=1)[:, : weight.shape[1]] for each in (scales, least))
    return least + values * scales


def test_ranks_that_cut_through_groups_of_int4_weights_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", intermediate=96)
    with pytest.raises(ConfigError, match=r"tp 2 splits the 96 of .*down_proj") as refused:
        logits(folder, TensorParallel(0, 2), Weights.INT4)
    assert refused.value.field == "engine.weights"


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"weights": "int8", "kernels": "torch"}, "engine.weights", "engine.kernels auto or native"),
        ({"weights": "fp8"}, "engine.weights", "compute capability 8.9 or more; on a CPU: dense, int8 or int4"),
        ({"kv_dtype": "int8", "dtype": "bfloat16"}, "engine.kv_dtype", "device cpu and dtype float32"),
        ({"batch_invariant": True, "dtype": "bfloat16"}, "engine.batch_invariant", "dtype float32"),
        ({"kernels": "native", "dtype": "float16"}, "engine.kernels", "dtype float32"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(tmp_path: Path, options: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        single_rank(write_tiny_llama(tmp_path / "m"), tmp_path / "r", **options)
    assert refused.value.field == field


def test_int4_on_a_gpu_is_refused_with_what_there_is() -> None:
    layout = KvPoolLayout(8, 1, 1, 16, 16, "bfloat16")
    spec = EngineSpec(device="cuda", dtype="bfloat16", weights="int4")
    with pytest.raises(ConfigError, match="on a GPU: dense, int8 or fp8") as refused:
        choose_kernels(spec, layout, 1)
    assert refused.value.field == "engine.weights"
    for weights in ("int8", "fp8"):
        assert choose_kernels(spec.model_copy(update={"weights": weights}), layout, 1) is None


def test_more_ranks_than_add_up_in_one_order_are_refused() -> None:
    layout = KvPoolLayout(8, 1, 1, 16, 16, "float32")
    with pytest.raises(ConfigError, match="tp of at most 2"):
        choose_kernels(EngineSpec(batch_invariant=True), layout, 4)


def test_without_a_compiler_torch_computes_and_int8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_for: Callable[[Path], Reference]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    folder, prompt = write_tiny_llama(tmp_path / "m", vocab=VOCAB, seed=1), random_prompt(40, VOCAB)
    rank = single_rank(folder, tmp_path / "r")
    assert alone(rank, prompt, GREEDY) == reference_for(folder).answer(prompt, GREEDY)
    with pytest.raises(ConfigError, match="C compiler") as refused:
        single_rank(folder, tmp_path / "r", weights="int8")
    assert refused.value.field == "engine.weights"
