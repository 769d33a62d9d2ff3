"""Reasoning that stands before the answer, between two marks. Harmony's channels: `formats/harmony.py`.

deepseek_r1   <think>…</think>                                  DeepSeek, Qwen 3, GLM, Kimi, MiniMax, Phi-4 and others
mistral       [THINK]…[/THINK]                                  Magistral
gemma4        <|channel>thought\\n…<channel|>                     Gemma 4
granite       Here is my thought process:…Here is my response:  Granite 3.2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from router.model_formats.grammar import Lark
from router.model_formats.reader import Markers, Reader, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """Args: `stops`: marks that end it as well, and belong to what follows."""

    name: str
    begin: str
    end: str
    stops: tuple[str, ...] = ()

    @cached_property
    def _ends(self) -> Markers:
        return Markers("\n" + self.end, self.end, *self.stops)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends within reasoning: templates open it for the model."""
        return prompt.rstrip().endswith(self.begin.rstrip())

    def grammar(self, lark: Lark, is_opened: bool) -> str:
        """An expression for the rest of it, or for it or nothing."""
        rest = f"{lark.until(self.end)} SPACE"
        return rest if is_opened else f"({lark.text(self.begin)} {rest})?"

    def read(self, reader: Reader, is_opened: bool) -> Steps[None]:
        """Reads reasoning if the answer begins with it; without an end, all of the answer is. The marks, line breaks
        beside them and white space after the end are dropped."""
        begun = yield from reader.mark(self.begin)
        if not begun and not is_opened:
            return
        yield from reader.take("\n")
        if (yield from reader.until(self._ends, reader.out.reasoning)):
            yield from reader.take("\n" + self.end, self.end)
            yield from reader.space()


_THINK = ("<think>", "</think>")
REASONINGS = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", *_THINK),
        ReasoningFormat("kimi_k2", *_THINK, stops=("<|tool_calls_section_begin|>",)),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}
