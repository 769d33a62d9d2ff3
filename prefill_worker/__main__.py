"""`python -m prefill_worker --launch FILE --rank R`: one rank of a prefill worker."""

from __future__ import annotations

from prefill_worker.role import PrefillRole
from tandem.clock import SystemClock
from worker.rank import RoleParts, main


def make_role(parts: RoleParts) -> PrefillRole:
    return PrefillRole(parts.identity, parts.engine, parts.agents, parts.requests, SystemClock())


if __name__ == "__main__":
    main(make_role, "One rank of a prefill worker.")
