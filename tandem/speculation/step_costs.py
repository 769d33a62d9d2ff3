"""What one more token in a decode step costs, measured: seconds = a + b × tokens, the recent steps with more weight."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.98
_IGNORED_STEPS = 3  # the first ones: memory is cold, kernels are compiled
_DOUBLING_TOKENS = 16.0  # until steps differ, this many tokens are taken to double the time of one without any
_LEAST_SPREAD = 0.05  # of token counts, squared, for the slope to be known
_OUTLIER = 4.0  # times the expected seconds: something else had the processor


@dataclass(slots=True)
class StepCosts:
    _ignored: int = 0
    _doubling: float = _DOUBLING_TOKENS  # a / b, as last known
    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _product: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """A step that only decoded, of so many tokens, proposed ones included."""
        if tokens < 1 or seconds <= 0.0:
            return
        if self._ignored < _IGNORED_STEPS:
            self._ignored += 1
            return
        if self._weight > 1.0:
            fixed, each = self.line()
            seconds = min(seconds, _OUTLIER * (fixed + each * tokens))
        self._weight = self._weight * _KEPT + 1.0
        self._tokens = self._tokens * _KEPT + tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._tokens_squared = self._tokens_squared * _KEPT + tokens * tokens
        self._product = self._product * _KEPT + tokens * seconds

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    def line(self) -> tuple[float, float]:
        """Seconds of a step (a), and of each of its tokens (b). Only their ratio is known before the first steps."""
        if not self._weight:
            return 1.0, 1.0 / self._doubling
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._tokens_squared / self._weight - tokens * tokens
        if spread < _LEAST_SPREAD:
            each = seconds / (self._doubling + tokens)
            return seconds - each * tokens, each
        each = (self._product / self._weight - tokens * seconds) / spread
        each = min(max(each, seconds / 1000.0), 0.99 * seconds / tokens)
        fixed = seconds - each * tokens
        self._doubling = fixed / each
        return fixed, each
