from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import CheckpointError, InputError
from tandem.testing.models import SPECIAL_TOKENS, write_tiny_llama
from tandem.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny_llama(tmp_path_factory.mktemp("model"), vocab=512))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_and_can_be_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>Hi<|im_end|>", add_special_tokens=False)

    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(ids[1])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hi"
    assert tokenizer.special_ids == frozenset(range(len(SPECIAL_TOKENS)))


def test_every_token_has_text_and_others_have_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512
    assert all(tokenizer.decode([each], skip_special_tokens=False) for each in range(512))
    assert tokenizer.token(512) is None
    assert tokenizer.decode([512]) == ""


def test_part_of_a_character_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids) == "é"


def test_a_lone_surrogate_is_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="Unicode"):
        tokenizer.encode("a\ud800b", add_special_tokens=False)


def test_a_file_that_asks_for_truncation_is_read_without_it(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path) / "tokenizer.json"
    value = json.loads(path.read_text())
    value["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(value))
    assert len(Tokenizer.load(tmp_path).encode("1234567890", add_special_tokens=False)) == 10


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer file, found none"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer, got"):
        Tokenizer.load(tmp_path)


def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = [f"text {n} é" for n in range(200)]
        coded = pool.map(lambda text: tokenizer.encode(text, add_special_tokens=False), texts)
        assert [tokenizer.decode(ids) for ids in coded] == texts
