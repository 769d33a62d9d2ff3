"""`python -m cluster.backends.rank_process --launch FILE --rank R`: one rank of a worker, able to take every role."""

from __future__ import annotations

from decode_worker.moving import MovingRole
from decode_worker.role import DecodeRole
from prefill_worker.role import PrefillRole
from tandem.clock import SystemClock
from worker.rank import RoleParts, main
from worker.roles import RoleHandler, RoleSet


def make_roles(parts: RoleParts) -> RoleSet:
    shared = (parts.identity, parts.engine, parts.agents, parts.requests, SystemClock())
    ttl_s = parts.launch.transfer.ticket_ttl_s
    prefill, moving, decode = PrefillRole(*shared), MovingRole(*shared, ttl_s), DecodeRole(*shared, ttl_s)
    by_frame: dict[str, RoleHandler] = {"prefill": prefill}
    by_frame |= dict.fromkeys(("generate", "reserve", "join"), decode)
    by_frame |= dict.fromkeys(("hold", "move", "resume"), moving)
    return RoleSet(parts.requests, (prefill, moving, decode), by_frame)


if __name__ == "__main__":
    main(make_roles, "One rank of a worker.")
