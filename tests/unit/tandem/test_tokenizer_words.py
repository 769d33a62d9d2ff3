"""Words from memory are the tokens that the library gives, whatever the text."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tandem.text.tokenizer import Tokenizer
from tandem.text.tokenizer_words import WordCache

TEXT = "the cat's 12 hats aren't here, 'tis said; naïve cafés don't re-open at 5 o'clock. what-ever they're worth\n" * 3
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), BYTES])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
LOCAL = {"gpt2": GPT2, "smollm": SMOLLM, "qwen2": split(QWEN), "llama3": split(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"))}


def trained(pre_tokenizer: Any, *, normalizer: Any = None, added: Any = "<|end|>") -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT], trainer)
    inner.add_special_tokens([added])
    return inner


INNER = {name: trained(each) for name, each in LOCAL.items()}
INNER["nfc"] = trained(split(QWEN), normalizer=normalizers.NFC())
SERVED = {name: Tokenizer(each) for name, each in INNER.items()}
PARTS = ["the", "cat's", "12", "hats", "'re", "re", "a", "é", "e\u0301", "<|end|>", "o'", "--", "日本", ".", ""]
WORDS = st.sampled_from(PARTS)
GAPS = st.sampled_from([" ", " ", " ", " ", "  ", "\n", " \n", "\t", "\u00a0", ""])
PAIRS = st.tuples(WORDS | st.text(max_size=4), GAPS)
TEXTS = st.lists(PAIRS, max_size=12).map(lambda parts: "".join(map("".join, parts)))


@pytest.mark.parametrize("name", INNER)
@given(text=TEXTS)
def test_remembered_words_are_the_librarys_tokens(name: str, text: str) -> None:
    expected = INNER[name].encode(text, add_special_tokens=False).ids
    for _ in range(2):  # learnt, then known
        assert SERVED[name].encode(text, add_special_tokens=False) == expected


def test_words_are_encoded_by_the_library_once() -> None:
    memory = WordCache(INNER["gpt2"])
    first = memory.encode("the cat said what the cat said.")
    memory._inner = None  # type: ignore[assignment]  # nobody left to ask
    assert memory.encode("the cat said what the cat said.") == first
    assert memory.encode("the said cat said.") is not None


def test_a_text_of_many_unknown_words_goes_to_the_library_whole() -> None:
    text = " ".join(f"word{number}x" for number in range(100))
    memory = WordCache(INNER["gpt2"])
    assert memory.encode(text) is None
    assert memory.encode(text) == INNER["gpt2"].encode(text, add_special_tokens=False).ids, "it learns on the way"


@pytest.mark.parametrize(
    "inner",
    [
        trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        trained(pre_tokenizers.Metaspace()),
        trained(split(r"\s+")),
        trained(GPT2, normalizer=normalizers.Lowercase()),
        trained(GPT2, added=tokenizers.AddedToken("<|end|>", rstrip=True)),
        trained(GPT2, added=tokenizers.AddedToken("two words")),
    ],
    ids=["prefix-space", "metaspace", "other-pattern", "normalizer", "stripping-token", "token-with-a-space"],
)
def test_tokenizers_that_may_look_across_words_are_left_alone(inner: tokenizers.Tokenizer) -> None:
    assert WordCache.of(inner) is None


@given(ids=st.lists(st.integers(0, 500), max_size=12))
def test_fixed_texts_add_up_to_the_decoded_text(ids: list[int]) -> None:
    tokenizer = SERVED["gpt2"]
    fixed = [each for each in ids if tokenizer.fixed_text(each) is not None]
    assert "".join(tokenizer.fixed_text(each) or "" for each in fixed) == tokenizer.decode(fixed)
    assert tokenizer.fixed_text(1 << 30) is None
