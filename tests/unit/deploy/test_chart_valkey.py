"""The chart's Valkey, started here by its own command: what its users may do, and what is refused to all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from cluster.backends import embedded_redis
from cluster.spec.redis_probe import check_redis
from cluster.spec.resolve import free_ports

EXAMPLES = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "examples"
PASSWORD, RAY_PASSWORD = "url-safe-password", "of-ray"

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]


@contextmanager
def running(render: Render, folder: Path, example: str) -> Iterator[str]:
    """A loopback address of its own, since the port is the chart's."""
    manifests = render("--values", str(EXAMPLES / example))
    pod = manifests["Deployment", "test-tandem-valkey"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (folder / "valkey-server").symlink_to(embedded_redis.binary())
    pid = os.getpid()
    ip = f"127.{77 + (pid >> 16) % 100}.{(pid >> 8) & 255}.{pid & 255 or 1}"
    env = {"PATH": f"{folder}:/usr/bin:/bin", "POD_IP": ip, "VALKEY_PASSWORD": PASSWORD, "RAY_PASSWORD": RAY_PASSWORD}
    command = [*container["command"], *container["args"]]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, cwd=folder)
    try:
        _wait_for(f"redis://tandem:{PASSWORD}@{ip}:6379/0")
        yield ip
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def address(render: Render, tmp_path: Path) -> Iterator[str]:
    with running(render, tmp_path, "valkey.yaml") as ip:
        yield ip


@pytest.fixture
def with_ray(render: Render, tmp_path: Path) -> Iterator[str]:
    with running(render, tmp_path, "ray-tables.yaml") as ip:
        yield ip


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            redis.Redis.from_url(url).ping()
            return
        except redis.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.acceptance(45, here="the chart's Valkey")
def test_the_user_does_what_tandem_does_and_no_more(address: str) -> None:
    url = f"redis://tandem:{PASSWORD}@{address}:6379/0"
    assert check_redis(url)
    client = redis.Redis.from_url(url)
    key = "tandem:{c}:prefix:decode-0:events"
    with client.pipeline(transaction=True) as pipe:
        pipe.xadd(key, {"a": "b"}, maxlen=10)
        pipe.set("tandem:{c}:prefix:decode-0:snapshot", b"x", ex=60)
        pipe.execute()
    assert client.xread({key: 0})
    answer = "tandem:{c}:idempotency:00"
    assert client.set(answer, b"x", nx=True, px=5000)
    assert client.get(answer) == b"x"
    assert client.pexpire(answer, 5000)
    assert client.delete(answer)
    for forbidden in (
        lambda: client.set("other", "x"),
        lambda: client.config_get("*"),
        client.flushall,
        lambda: client.eval("return 1", 0),
        lambda: client.function_list(),
        lambda: client.publish("tandem:channel", "x"),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            forbidden()


def test_ray_has_its_own_tables_and_no_other_keys(with_ray: str) -> None:
    ray = redis.Redis.from_url(f"redis://ray:{RAY_PASSWORD}@{with_ray}:6379/0")
    tandem = redis.Redis.from_url(f"redis://tandem:{PASSWORD}@{with_ray}:6379/0")
    table = "RAYserving.test-tandem@ACTOR"
    assert ray.hset(table, "a", "b")
    assert ray.hget(table, "a") == b"b"
    assert not ray.delete("DUMMY")  # with which Ray looks for the leader
    with pytest.raises(redis.exceptions.ResponseError, match="cluster support disabled"):
        ray.cluster("INFO")  # which it asks too
    assert tandem.set("tandem:{c}:x", b"1")
    for forbidden in (
        lambda: tandem.hget(table, "a"),
        lambda: ray.get("tandem:{c}:x"),
        lambda: ray.hset("RAYother.test-tandem@ACTOR", "a", "b"),
        lambda: ray.config_get("*"),
        ray.flushall,
        lambda: ray.eval("return 1", 0),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            forbidden()
    policy = ray.info("memory")["maxmemory_policy"]
    assert policy == "volatile-lru", "Ray's tables have no time to live, and must not be evicted"


@pytest.mark.slow
def test_rays_head_started_again_knows_the_node_of_the_one_before(with_ray: str) -> None:
    folder = Path(f"/tmp/ray-tables-{os.getpid()}")  # short: Ray's unix sockets lie below it
    folder.mkdir(mode=0o700)
    (port,) = free_ports(with_ray)
    env = os.environ | {
        "RAY_REDIS_ADDRESS": f"{with_ray}:6379",
        "RAY_external_storage_namespace": "serving.test-tandem",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    user = ("--redis-username=ray", f"--redis-password={RAY_PASSWORD}", f"--temp-dir={folder}", "--block")
    size = ("--num-cpus=1", "--object-store-memory=83886080", "--include-dashboard=false")
    command = [f"{Path(sys.executable).parent}/ray", "start", "--head", f"--port={port}", *user, *size]
    try:
        found = [_nodes_of_a_head([*command, f"--node-ip-address={with_ray}"], env, f"{with_ray}:{port}")]
        found.append(_nodes_of_a_head([*command, f"--node-ip-address={with_ray}"], env, f"{with_ray}:{port}"))
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert len(found[0]) == 1
    assert found[0] <= found[1], "its tables were not read"


def _nodes_of_a_head(command: list[str], env: dict[str, str], address: str) -> set[bytes]:
    """Starts a head, and kills it when it has told the nodes that it knows."""
    head = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ask = "import sys; from ray._raylet import GcsClient; "
    ask += "print(*(each.hex() for each in GcsClient(address=sys.argv[1]).get_all_node_info(timeout=2)))"
    deadline = time.monotonic() + 60
    before: set[bytes] = set()
    try:
        while True:
            asked = [sys.executable, "-c", ask, address]
            done = subprocess.run(asked, env=env, capture_output=True, check=False, timeout=30)
            known = set(done.stdout.split())
            if known and known == before:  # the node itself registers a moment after the GCS answers
                return known
            before = known
            assert head.poll() is None
            assert time.monotonic() < deadline, done.stderr.decode()[-500:]
            time.sleep(1.0)
    finally:
        family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(10)


@pytest.mark.parametrize("url", ["redis://{}:6379", "redis://:url-safe-password@{}:6379", "redis://tandem:no@{}:6379"])
def test_nobody_else_is_let_in(address: str, url: str) -> None:
    with pytest.raises((redis.AuthenticationError, redis.exceptions.ResponseError)):
        redis.Redis.from_url(url.format(address)).ping()


@pytest.mark.parametrize(
    ("limits", "megabytes"), [(".memory=512Mi", 384), (".memory=256Mi", 192), (".memory=2Gi", 1536), ("=null", 384)]
)
def test_valkey_evicts_keys_before_the_kernel_ends_it(render: Render, limits: str, megabytes: int) -> None:
    set_limits = ("--set", f"redis.valkey.resources.limits{limits}")
    manifests = render("--values", str(EXAMPLES / "router-pods.yaml"), *set_limits)
    (container,) = manifests["Deployment", "test-tandem-valkey"]["spec"]["template"]["spec"]["containers"]
    assert f"maxmemory {megabytes}mb\n" in "".join(container["args"])
