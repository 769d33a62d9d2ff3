"""How many gRPC calls may run at a time, over all services of the port."""

from __future__ import annotations

from tandem.errors import OverloadedError


class CallLimit:
    """`with limit:` around a call. Raises OverloadedError when there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = 0

    def __enter__(self) -> None:
        if self._calls >= self._most:
            raise OverloadedError(f"expected at most {self._most} concurrent calls; retry later", retry_after_s=1.0)
        self._calls += 1

    def __exit__(self, *exc: object) -> None:
        self._calls -= 1
