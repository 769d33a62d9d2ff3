"""Workers go to the Ray nodes that their group and their partners ask for: real Ray, several nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

SCRIPT = textwrap.dedent(
    """
    import asyncio, pathlib, sys
    from cluster.backends.ray_env import prepare_local_ray
    prepare_local_ray(None)
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.cluster_utils import Cluster
    from cluster.backends.protocol import Resources, Where
    from cluster.backends.ray_backend import RayBackend
    from cluster.keeper.keeper import Keeper
    from tandem.config.model import Colocate
    from tandem.errors import ConfigError

    GPU = (Resources(cpus=0.1, gpus=1.0),)

    async def main(folder):
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
        add = lambda group, gpus: nodes.add_node(
            num_cpus=1, num_gpus=gpus, object_store_memory=80_000_000, labels={"tandem/node-group": group}
        )
        names = {add(group, gpus).node_id: name for name, group, gpus in (
            ("h100-0", "h100", 2), ("h200-0", "h200", 2), ("pairs-0", "pairs", 2), ("pairs-1", "pairs", 2)
        )}
        backend = RayBackend("c", "k", folder / "logs", Keeper(folder / "logs"), nodes.address, 10.0)
        await backend.open()

        def at(group):
            return names[backend._placements._nodes.node_of()[group]]

        # Groups.
        for number, group in enumerate(("h100", "h200", "h100")):
            await backend.place(f"w-{number}", GPU, Where(node_groups=(group,)))
            assert await backend.node_group(f"w-{number}") == group
        try:
            await backend.place("w-3", GPU, Where(node_groups=("h100",)))
            raise AssertionError
        except ConfigError as error:
            assert "no Ray node with the label tandem/node-group=h100 has" in error.message, error.message
        await backend.place("w-3", GPU, Where(node_groups=("h100", "h200")))
        assert at("w-3") == "h200-0"

        # A pair for each machine, in whatever order they ask.
        def paired(name, colocate):
            kinds = {"p": ("p-0", "p-1"), "d": ("d-0", "d-1")}
            own, other = kinds[name[0]], kinds["d" if name[0] == "p" else "p"]
            alike = tuple(each for each in own if each != name)
            return backend.place(name, GPU, Where(("pairs",), colocate, alike, other, GPU))

        for colocate in (Colocate.REQUIRE, Colocate.PREFER):
            await asyncio.gather(*(paired(name, colocate) for name in ("p-0", "p-1", "d-0", "d-1")))
            pairs = {name: at(name) for name in ("p-0", "p-1", "d-0", "d-1")}
            assert {pairs["p-0"], pairs["p-1"]} == {pairs["d-0"], pairs["d-1"]} == {"pairs-0", "pairs-1"}, pairs
            for name in pairs:
                await backend.release(name)
            while sum(each.free["GPU"] for each in backend._placements._nodes.machines(Where(("pairs",)))) < 4:
                await asyncio.sleep(0.1)  # Ray counts what is released a moment later
        where = Where(("pairs",), Colocate.REQUIRE, (), ("d-0",), GPU)
        wide = (Resources(cpus=0.1, gpus=1.0),) * 2
        try:
            await backend.place("p-0", wide, where)  # no room for the partner
            raise AssertionError
        except ConfigError as error:
            assert "beside workers of the other role (colocate: require)" in error.message, error.message
        await backend.place("p-0", wide, Where(("pairs",), Colocate.PREFER, (), ("d-0",), GPU))
        # A worker without room is what Ray's autoscaler counts, and waits for the node that this brings.
        backend._place_timeout_s = 120.0
        waiting = asyncio.create_task(backend.place("late", GPU, Where(node_groups=("late",))))
        while not get_cluster_status(nodes.address).resource_demands.placement_group_demand:
            await asyncio.sleep(0.1)
        assert not waiting.done()
        names[add("late", 1).node_id] = "late-0"
        await waiting
        assert at("late") == "late-0"
        while get_cluster_status(nodes.address).resource_demands.placement_group_demand:
            await asyncio.sleep(0.1)
        await backend.release("late")
        while "late-0" not in {names.get(each.node_id) for each in get_cluster_status(nodes.address).idle_nodes}:
            await asyncio.sleep(0.1)
        await backend.close()
        nodes.shutdown()
        print("all good")

    asyncio.run(main(pathlib.Path(sys.argv[1])))
    """
)


@pytest.mark.slow
def test_workers_go_to_their_groups_and_beside_their_partners() -> None:
    """In a process of its own: Ray reads its token when it is imported, and keeps it."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        command = [sys.executable, "-c", SCRIPT, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout.endswith("all good\n"), done.stdout + done.stderr[-3000:]
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
