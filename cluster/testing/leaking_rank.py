"""A rank that forgets the first KV block of each request that ends while a file `leaks` is in its run folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cluster.backends.rank_process import make_roles
from tandem.engine.engine import TandemEngine
from tandem.kvcache.block_pool import BlockHold
from worker.rank import RoleParts, main
from worker.roles import RoleSet

LEAK_FILE = "leaks"


def make_leaking_roles(parts: RoleParts) -> RoleSet:
    assert isinstance(parts.engine, TandemEngine)
    pool = parts.engine._scheduler.pool
    release, fault = pool.release, Path(parts.launch.run_dir) / LEAK_FILE

    def leaking_release(blocks: Iterable[int], hold: BlockHold) -> None:
        held = list(blocks)
        release(held[1:] if fault.exists() else held, hold)

    pool.release = leaking_release  # type: ignore[method-assign]
    return make_roles(parts)


if __name__ == "__main__":
    main(make_leaking_roles, "A rank that leaks KV blocks.")
