"""`tandem apply`: a changed spec for a running cluster, by its admin service."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.cli.admin_client import Admin
from cluster.cli.commands.live_ratio import controller_at
from tandem.errors import ConfigError
from tandem.v1 import cluster_pb2


def run_apply(file: Path, dry_run: bool, admin: Admin) -> int:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"FILE: {file}: {error.strerror}", field="FILE") from None
    except UnicodeDecodeError:
        raise ConfigError(f"FILE: {file}: expected YAML in UTF-8", field="FILE") from None
    return asyncio.run(_apply(admin, cluster_pb2.ApplyRequest(spec=text, dry_run=dry_run)))


async def _apply(admin: Admin, request: cluster_pb2.ApplyRequest) -> int:
    async with controller_at(admin) as stub:
        answer = await stub.Apply(request)
    for change in answer.changes or ["nothing to do: the cluster is as the spec says"]:
        print(change)
    return 0
