from __future__ import annotations

import asyncio

import pytest

from tandem.backoff import Backoff


async def test_waits_double_up_to_the_most_and_begin_anew_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    backoff = Backoff(first_s=0.1, most_s=0.3)
    for _ in range(4):
        await backoff.wait()
    backoff.reset()
    await backoff.wait()
    backoff.skip_to_most()
    await backoff.wait()
    assert waits == [0.1, 0.2, 0.3, 0.3, 0.1, 0.3]
