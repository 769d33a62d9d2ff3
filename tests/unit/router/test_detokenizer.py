import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.texts.detokenizer import STATE_BYTES, AutomatonCache, Detokenizer, StopAutomaton, StopStrings


class ByteDecoder:
    """Each token is one byte; 256 and up are special and have no text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def fixed_text(self, token_id: int) -> str | None:
        return None


def pieces(data: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(ByteDecoder(), prompt)
    return [*(detokenizer.push(token) for token in data), detokenizer.flush()]


@given(st.text(max_size=40), st.text(max_size=8))
def test_text_comes_out_whole_and_characters_are_never_split(text: str, prompt: str) -> None:
    out = pieces(text.encode(), prompt.encode())
    assert "".join(out) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in out)


def test_character_comes_with_its_last_byte() -> None:
    assert pieces("a€b".encode()) == ["a", "", "", "€", "b", ""]


def test_incomplete_character_at_the_end_is_replaced() -> None:
    assert pieces("a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_endless_garbage_does_not_pile_up_and_spares_what_follows() -> None:
    out = pieces(b"\x80" * 40 + "né€".encode())
    joined = "".join(out)
    assert joined.count("\ufffd") == 40
    assert joined.endswith("né€")
    assert any(out[:20])


def test_special_tokens_have_no_text() -> None:
    assert pieces([104, 300, 105]) == ["h", "", "i", ""]


@pytest.mark.parametrize(
    ("stops", "chunks", "text", "stopped"),
    [
        (["END"], ["one E", "N", "D two"], "one ", True),
        (["END"], ["one E", "NX"], "one ENX", False),
        (["END"], ["one EN"], "one EN", False),
        (["b", "abc"], ["a", "b"], "a", True),
        (["b", "abc"], ["abc"], "a", True),
        (["cd", "bcd"], ["abc", "d"], "a", True),
        (["abab", "babc"], ["aba", "bc"], "", True),
        (["abab!", "babc"], ["aba", "bc"], "a", True),
        (["aab"], ["a", "a", "a", "b"], "a", True),
        (["x"], ["x"], "", True),
        ([], ["abc"], "abc", False),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", True),
    ],
)
def test_stop_strings(stops: list[str], chunks: list[str], text: str, stopped: bool) -> None:
    strings = StopStrings(stops)
    out = ""
    for chunk in chunks:
        result = strings.push(chunk)
        out += result.text
        if result.stopped:
            assert (out, True) == (text, stopped)
            return
    assert (out + strings.flush(), False) == (text, stopped)


@given(
    st.lists(st.text("ab", max_size=6), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_how_the_text_is_divided_makes_no_difference(chunks: list[str], stops: list[str]) -> None:
    shown = []
    for parts in (chunks, list("".join(chunks)), ["".join(chunks)]):
        strings, out = StopStrings(stops), ""
        for part in parts:
            result = strings.push(part)
            out += result.text
            if result.stopped:
                break
        else:
            out += strings.flush()
        shown.append(out)
    assert len(set(shown)) == 1


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_let_out(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    out = ""
    for character in text:
        result = strings.push(character)
        out += result.text
        if result.stopped:
            break
    else:
        out += strings.flush()
        assert out == text
    assert not any(stop in out for stop in stops)
    assert text.startswith(out)


class Counted(list[int]):
    """Counts the reads of its items."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("count", [1, 16])
def test_the_cost_of_a_text_does_not_depend_on_the_number_of_stop_strings(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of the automaton: one for each character, and as many ways back as there were ways forth."""
    steps = 0
    step = StopAutomaton.step

    def counting(self: StopAutomaton, state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return step(self, state, char)

    stops = StopStrings(["a" * (240 + number) + "b" for number in range(count)])
    automaton = stops._automaton
    assert automaton is not None
    automaton.shorter = Counted(automaton.shorter)
    monkeypatch.setattr(StopAutomaton, "step", counting)
    text = ("a" * 200 + "c") * 20
    assert "".join(stops.push(text[at : at + 7]).text for at in range(0, len(text), 7)) + stops.flush() == text
    assert steps == len(text)
    assert automaton.shorter.reads <= len(text)


def held_bytes(automaton: StopAutomaton, stops: tuple[str, ...]) -> int:
    """All objects that an automaton and its key hold, each once."""
    numbers = (automaton.depth, automaton.longest, automaton.shorter)
    parts: list[object] = [automaton.edges, *automaton.edges, *numbers, stops, *stops]
    parts += [each for edges in automaton.edges for pair in edges.items() for each in pair]
    parts += [each for each_list in numbers for each in each_list]
    return sum(map(sys.getsizeof, {id(part): part for part in parts}.values()))


@pytest.mark.parametrize(
    "stops",
    [
        tuple(chr(97 + each) * 256 for each in range(16)),
        tuple(chr(0x4E00 + 256 * each) + "".join(map(chr, range(0x4E01, 0x4F00))) for each in range(16)),
        tuple(chr(0x1F600 + each) + chr(0x1F600) * 255 for each in range(16)),
        ("a",),
    ],
    ids=["ascii", "cjk", "emoji", "short"],
)
def test_a_kept_automaton_is_counted_with_no_less_than_it_holds(stops: tuple[str, ...]) -> None:
    cache = AutomatonCache(1 << 30)
    automaton = cache.get(stops)
    beside = 2048  # of the empty lists and the tuple
    assert held_bytes(automaton, stops) <= cache.kept_bytes + beside


def test_automata_are_kept_within_a_size_the_last_used_ones() -> None:
    def stops(number: int) -> tuple[str, ...]:
        return (chr(97 + number) * 99,)  # 100 states

    cache = AutomatonCache(3 * 100 * STATE_BYTES)
    first, second, third = (cache.get(stops(number)) for number in range(3))
    assert cache.get(stops(0)) is first
    cache.get(stops(3))
    assert (len(cache), cache.kept_bytes) == (3, 3 * 100 * STATE_BYTES)
    assert cache.get(stops(0)) is first
    assert cache.get(stops(2)) is third
    assert cache.get(stops(1)) is not second


def test_an_automaton_larger_than_the_cache_is_made_and_not_kept() -> None:
    cache = AutomatonCache(STATE_BYTES)
    assert cache.get(("abc",)).longest[3] == 3
    assert (len(cache), cache.kept_bytes) == (0, 0)
