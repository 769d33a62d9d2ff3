"""How many gRPC calls may do the same thing at a time, of all callers and of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import OverloadedError


class CallLimit:
    """`with limit:` around a call, or `with limit.of(caller):`. Raises OverloadedError if it is reached."""

    def __init__(self, max_calls: int, max_of_one: int | None = None, what: str = "concurrent calls") -> None:
        """`max_of_one`: of one caller; None: as many as of all."""
        self._max_calls = max_calls
        self._max_of_one = max_calls if max_of_one is None else max_of_one
        self._what = what
        self._calls = 0
        self._of_one: dict[str, int] = {}

    def __enter__(self) -> None:
        self.enter("")

    def __exit__(self, *exc: object) -> None:
        self.leave("")

    @contextmanager
    def of(self, caller: str) -> Iterator[None]:
        self.enter(caller)
        try:
            yield
        finally:
            self.leave(caller)

    def enter(self, caller: str) -> None:
        held = self._of_one.get(caller, 0)
        if self._calls >= self._max_calls:
            text = f"expected at most {self._max_calls} {self._what}; retry later"
            raise OverloadedError(text, retry_after_s=1.0)
        if held >= self._max_of_one:
            text = f"expected at most {self._max_of_one} {self._what} of one key or address; end some, or retry later"
            raise OverloadedError(text, retry_after_s=1.0)
        self._calls += 1
        self._of_one[caller] = held + 1

    def leave(self, caller: str) -> None:
        self._calls -= 1
        self._of_one[caller] -= 1
        if not self._of_one[caller]:
            del self._of_one[caller]
