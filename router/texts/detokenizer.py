"""Turns tokens into text as they arrive. Never splits a character or returns the start of a stop string. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from tandem.text.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 5  # context for decoders that treat a text's first token differently (leading spaces)
MAX_PENDING_TOKENS = 8  # a character has at most 4 byte tokens; a longer run that ends in U+FFFD is not UTF-8
MAX_AUTOMATA_BYTES = 8 << 20
STATE_BYTES = 448  # of an automaton, at most: its dict, its numbers, and its character in the key
_INCOMPLETE = "\ufffd"
_TAIL_TOKENS = 3  # an incomplete character at the end takes at most 3 byte tokens


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def fixed_text(self, token_id: int) -> str | None:
        """Returns the token's text; None if it depends on neighbouring tokens."""
        ...


class KeptTokens:
    """Decodes the text of some special tokens too."""

    def __init__(self, tokenizer: Tokenizer, kept: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._kept = kept

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [each for each in ids if each in self._kept or not self._tokenizer.is_special(each)]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def fixed_text(self, token_id: int) -> str | None:
        fixed = self._tokenizer.fixed_text(token_id)
        return self._tokenizer.token(token_id) if fixed == "" and token_id in self._kept else fixed


class Detokenizer:
    """Text of a growing token sequence. If a token's text depends on its neighbours, it decodes a short window with and
    without the token. The difference is the new text."""

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = list(prompt[-PROMPT_TAIL_TOKENS:])
        self._shown = len(self._ids)  # tokens whose text was returned
        self._shown_text: str | None = None  # None: not decoded, as mostly nothing needs it

    def push(self, token_id: int) -> str:
        """Returns the characters that `token_id` completes; may be empty."""
        if self._shown == len(self._ids) and (fixed := self._decoder.fixed_text(token_id)) is not None:
            self._ids, self._shown, self._shown_text = [token_id], 1, fixed
            return fixed
        self._ids.append(token_id)
        text = self._text(len(self._ids))
        if text.endswith(_INCOMPLETE):
            if len(self._ids) - self._shown < MAX_PENDING_TOKENS:
                return ""
            return self._show_broken(text)
        return self._show(len(self._ids), text)

    def flush(self) -> str:
        """Returns the rest at the end, with U+FFFD for incomplete characters."""
        return self._show(len(self._ids), self._text(len(self._ids)))

    def _show_broken(self, text: str) -> str:
        """Returns the text that later tokens cannot change."""
        for end in range(len(self._ids) - _TAIL_TOKENS, self._shown, -1):
            shorter = self._text(end)
            if text.startswith(shorter):
                return self._show(end, shorter)
        return ""

    def _show(self, end: int, text: str) -> str:
        shown = self._text(self._shown) if self._shown_text is None else self._shown_text
        new = text[len(shown) :]
        # The tokens just returned become the context of the next.
        self._ids = self._ids[self._shown :] if end > self._shown else self._ids
        self._shown = end - self._shown if end > self._shown else self._shown
        self._shown_text = self._text(self._shown)
        return new

    def _text(self, end: int) -> str:
        return self._decoder.decode(self._ids[:end], skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class StopResult:
    """`stop`: the stop string that is complete; None: none is."""

    text: str
    stop: str | None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopAutomaton:
    """The automaton of Aho and Corasick (1975): one step for each character, for any number of strings.

    A state is what could become a stop string: `depth` characters. `longest`: of the stop strings that end there, the
    length of the longest; 0: none does.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depth, self.longest, self.shorter = [0], [0], [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.edges[state]:
                self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.depth.append(self.depth[state] + 1)
                self.longest.append(0)
                self.shorter.append(0)
            state = self.edges[state][char]
        self.longest[state] = self.depth[state]

    def _link(self) -> None:
        """`shorter`: the state of the longest proper suffix that could become a stop string. Breadth first."""
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self.edges[state].items():
                self.shorter[target] = self.step(self.shorter[state], char)
                queue.append(target)
            self.longest[state] = self.longest[state] or self.longest[self.shorter[state]]

    def step(self, state: int, char: str) -> int:
        edges = self.edges
        while state and char not in edges[state]:
            state = self.shorter[state]
        return edges[state].get(char, 0)


class AutomatonCache:
    """Most clients send the same stop strings again. Keeps the automata used last, within `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.kept_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, ...], StopAutomaton] = OrderedDict()
        self._lock = Lock()

    def get(self, stops: tuple[str, ...]) -> StopAutomaton:
        """Takes up to 7 ms for the most that a request may have."""
        with self._lock:
            if (found := self._kept.get(stops)) is not None:
                self._kept.move_to_end(stops)
                return found
        made = StopAutomaton(stops)
        with self._lock:
            if stops not in self._kept:
                self._kept[stops] = made
                self.kept_bytes += _kept_bytes(made)
            while self.kept_bytes > self._max_bytes:
                self.kept_bytes -= _kept_bytes(self._kept.popitem(last=False)[1])
        return made

    def __len__(self) -> int:
        return len(self._kept)


def _kept_bytes(automaton: StopAutomaton) -> int:
    return STATE_BYTES * len(automaton.edges)


stop_automaton = AutomatonCache(MAX_AUTOMATA_BYTES).get


class StopStrings:
    """Returns text up to the first stop string to be complete (of several, the longest), and holds back a possible
    start of one. How the text is divided makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = stop_automaton(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopResult:
        if (automaton := self._automaton) is None:
            return StopResult(text, None)
        state, step, longest = self._state, automaton.step, automaton.longest
        whole = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            state = step(state, char)
            if longest[state]:
                self._held = ""
                begin = end - longest[state]
                return StopResult(whole[:begin], whole[begin:end])
        self._state = state
        shown = len(whole) - automaton.depth[state]
        self._held = whole[shown:]
        return StopResult(whole[:shown], None)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
