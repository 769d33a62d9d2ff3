"""`python -m decode_worker --launch FILE --rank R`: one rank of a decode worker."""

from __future__ import annotations

from decode_worker.role import DecodeRole
from tandem.clock import SystemClock
from worker.rank import RoleParts, main


def make_role(parts: RoleParts) -> DecodeRole:
    ttl_s = parts.launch.transfer.ticket_ttl_s
    return DecodeRole(parts.identity, parts.engine, parts.agents, parts.requests, SystemClock(), ttl_s)


if __name__ == "__main__":
    main(make_role, "One rank of a decode worker.")
