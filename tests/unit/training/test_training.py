"""A model's own answers teach heads what it says next, and the engine takes what was fitted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from cluster.cli.main import app
from tandem.errors import CheckpointError, TandemError
from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import write_tiny_llama
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.training.hidden_states import states_of
from tandem.training.own_answers import Answer, OwnAnswers

VOCAB = 320
PROMPT = "Tell me of the fox."
QUICK = ("--tokens", "8000", "--passes", "12", "--threads", "1", "--vocabulary", "320")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=VOCAB, seed=1, layers=3)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One, whose greedy answer comes again and again and can be learnt by heart."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text(f"{PROMPT}\n\n")
    return path


def train(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train-heads", *map(str, arguments)])


@pytest.mark.parametrize(
    "kind", ["medusa", *(pytest.param(each, marks=pytest.mark.slow) for each in ("early_exit", "eagle3"))]
)
def test_what_was_fitted_is_accepted(model: Path, prompts: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    result = train(kind, "-o", folder, "--model", model, "--prompts", prompts, *QUICK)
    assert result.exit_code == 0, result.output
    assert "not fitted to" in result.output
    drafting = {"speculation": kind, "speculation_model": str(folder), "speculation_tokens": 4}
    weights = {"weights": "int8"}  # that gave the answers
    rank = single_rank(model, tmp_path / "rendezvous", None, None, **weights, **drafting)
    speculator = rank.engine.speculator
    assert speculator is not None
    for tokens in (1, 2, 3, 9) * 20:  # more tokens cost nearly nothing
        speculator.costs.learn(tokens, 1.0 + 1e-4 * tokens)
        speculator.pass_costs.learn(tokens, 1e-3)
    text = ChatTemplate.load(model)
    assert text is not None
    prompt = Tokenizer.load(model).encode(text.render([{"role": "user", "content": PROMPT}]), add_special_tokens=False)
    drivers = (
        EngineDriver(rank.engine),
        EngineDriver(single_rank(model, tmp_path / "plain", None, None, **weights).engine),
    )
    for driver in drivers:
        driver.add("r", prompt, SamplingParams(temperature=0.0, max_tokens=100))
        driver.run()
    assert drivers[0].tokens == drivers[1].tokens
    # Of random weights and 320 tokens, half of them drawn: without fitting none would be right.
    assert speculator.accepted > 0.1 * speculator.proposed > 2


def test_hidden_states_are_those_of_the_tokens_that_chose(model: Path, tmp_path: Path) -> None:
    """The head makes of each the token that followed."""
    rank = single_rank(model, tmp_path / "rendezvous", kernels="torch")
    driver = EngineDriver(rank.engine)
    for length in (5, 40):
        driver.add(str(length), [*range(3, 3 + length)], SamplingParams(temperature=0.0, max_tokens=20))
    driver.run()
    answers = [Answer((*range(3, 3 + length), *driver.tokens[str(length)]), length) for length in (5, 40)]
    states = states_of(rank, answers, ahead=3, layer=1)
    assert states.early is not None
    assert states.hidden.shape == states.early.shape == (40, 64)
    assert torch.equal(rank.model.logits_of_normed(states.hidden).argmax(dim=1), states.chosen[:, 0])
    assert states.chosen[:, 0].tolist() == [*driver.tokens["5"], *driver.tokens["40"]]
    assert states.chosen[17].tolist() == [*driver.tokens["5"][17:20]]
    assert states.chosen[19].tolist() == [driver.tokens["5"][19], -1, -1]


def test_a_chat_model_asks_itself_different_questions(model: Path, tmp_path: Path) -> None:
    rank = single_rank(model, tmp_path / "rendezvous", kv_blocks=1000)
    asked = OwnAnswers(rank, Tokenizer.load(model), ChatTemplate.load(model), [], seed=5)
    answers = asked.take(500, lambda _: None)
    assert sum(answer.answered for answer in answers) >= 500
    questions = {answer.tokens[: answer.begin] for answer in answers}
    assert len(questions) > 25


def test_a_model_without_a_template_needs_prompts(model: Path, tmp_path: Path) -> None:
    rank = single_rank(model, tmp_path / "rendezvous", kv_blocks=1000)
    with pytest.raises(CheckpointError, match="--prompts"):
        OwnAnswers(rank, Tokenizer.load(model), None, [], seed=5)
    answers = OwnAnswers(rank, Tokenizer.load(model), None, ["fox"], seed=5).take(100, lambda _: None)
    assert len({answer.tokens[: answer.begin] for answer in answers}) == 1


@pytest.mark.parametrize("silent", [3, 1000])
def test_only_as_many_prompts_as_a_whole_batch_without_an_answer_end_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    """16 tokens are asked of one prompt at a time."""
    asked = OwnAnswers(
        single_rank(model, tmp_path / "rendezvous", kv_blocks=1000), Tokenizer.load(model), None, ["fox"], seed=5
    )
    answer, rounds = asked._answers, itertools.count(1)
    monkeypatch.setattr(asked, "_answers", lambda *given: [()] if next(rounds) <= silent else answer(*given))
    if silent == 3:
        assert asked.take(16, lambda _: None)
    else:
        with pytest.raises(CheckpointError, match=r"any of 32 prompts"):
            asked.take(16, lambda _: None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("medusa", "--layer", "1"), "--layer: is for early_exit"),
        (("early_exit", "--heads", "4"), "--heads: is for medusa"),
        (("early_exit", "--layer", "3"), "fewer than the model's 3 layers"),
        (("medusa", "--prompts", "nowhere.txt"), "expected a file of UTF-8 text"),
        (("medusa", "--prompts", "/dev/null"), "a prompt in each line"),
        (("medusa", "-o", "."), "a new or an empty folder"),
    ],
)
def test_what_cannot_be_fitted_is_said_before_work_begins(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    where = () if "-o" in arguments else ("-o", tmp_path / "new")
    result = train(*arguments, *where, "--model", model)
    assert isinstance(result.exception, TandemError)
    assert said in str(result.exception)


def test_a_folder_says_what_was_fitted(model: Path, prompts: Path, tmp_path: Path) -> None:
    quick = ("--tokens", "100", "--passes", "1", "--vocabulary", "40", "--heads", "2")
    assert train("medusa", "-o", tmp_path / "m", "--model", model, "--prompts", prompts, *quick).exit_code == 0
    config: dict[str, Any] = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], len(config["vocabulary"])) == (2, 1, 40)
