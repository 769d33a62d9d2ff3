"""Rate limits per key: token buckets that hold one minute's worth. Each router has its own."""

from __future__ import annotations

from dataclasses import dataclass

from router.auth.principal import Principal
from tandem.clock import Clock
from tandem.errors import RateLimited

_MINUTE_S = 60.0
_MAX_BUCKETS = 10_000  # beyond this, full ones are dropped


@dataclass(slots=True)
class Bucket:
    """Fills up within a minute. `level` may fall below 0, as the length of an answer is known only at its end."""

    per_minute: float
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / _MINUTE_S)
        self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until it holds `amount`, or is full if `amount` exceeds its size."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * _MINUTE_S / self.per_minute)


class RateLimiter:
    """Pure but for the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def take_request(self, principal: Principal) -> None:
        """Raises RateLimited."""
        limit = principal.limits.requests_per_minute
        if limit is not None:
            bucket = self._bucket(principal, "requests", limit)
            self._check(bucket, 1, "requests")
            bucket.level -= 1

    def check_tokens(self, principal: Principal, tokens: int) -> None:
        """Checks the limit for a prompt of `tokens`, without taking them. Raises RateLimited."""
        limit = principal.limits.tokens_per_minute
        if limit is not None:
            self._check(self._bucket(principal, "tokens", limit), tokens, "tokens")

    def spend_tokens(self, principal: Principal, tokens: int) -> None:
        """Takes the tokens of a prompt or of an answer; below 0, gives them back."""
        limit = principal.limits.tokens_per_minute
        if limit is not None and tokens:
            self._bucket(principal, "tokens", limit).level -= tokens

    def _check(self, bucket: Bucket, amount: int, what: str) -> None:
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            raise RateLimited(
                f"the key's limit is {bucket.per_minute:g} {what} per minute; retry after {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    def _bucket(self, principal: Principal, what: str, limit: int) -> Bucket:
        now_s = self._clock.now_s()
        found = self._buckets.get((principal.key_id, what))
        if found is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._drop_full(now_s)
            found = self._buckets[principal.key_id, what] = Bucket(limit, limit, now_s)
        elif found.per_minute != limit:  # the keys file has changed
            found.per_minute, found.level = limit, min(found.level, limit)
        found.fill(now_s)
        return found

    def _drop_full(self, now_s: float) -> None:
        """A full bucket is the same as a new one."""
        for bucket in self._buckets.values():
            bucket.fill(now_s)
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.level < bucket.per_minute}
