"""The chart's Valkey, started here by its own command: what its one user may do, and what nobody may."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cluster.backends import embedded_redis
from cluster.spec.redis_probe import check_redis

VALKEY = ("--values", str(Path(__file__).resolve().parents[3] / "helm" / "tandem" / "examples" / "valkey.yaml"))
PASSWORD = "url-safe-password"


@pytest.fixture
def address(render: Callable[..., dict[tuple[str, str], dict[str, Any]]], tmp_path: Path) -> Iterator[str]:
    """A loopback address of its own, since the port is the chart's."""
    pod = render(*VALKEY)["Deployment", "test-tandem-valkey"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (tmp_path / "valkey-server").symlink_to(embedded_redis.binary())
    pid = os.getpid()
    ip = f"127.{77 + (pid >> 16) % 100}.{(pid >> 8) & 255}.{pid & 255 or 1}"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": ip, "VALKEY_PASSWORD": PASSWORD}
    process = subprocess.Popen([*container["command"], *container["args"]], env=env, stdout=subprocess.DEVNULL)
    try:
        _wait_for(f"redis://tandem:{PASSWORD}@{ip}:6379/0")
        yield ip
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 10
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


@pytest.mark.parametrize("url", ["redis://{}:6379", "redis://:url-safe-password@{}:6379", "redis://tandem:no@{}:6379"])
def test_nobody_else_is_let_in(address: str, url: str) -> None:
    with pytest.raises((redis.AuthenticationError, redis.exceptions.ResponseError)):
        redis.Redis.from_url(url.format(address)).ping()
