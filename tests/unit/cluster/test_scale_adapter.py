"""Pools get the sizes that Kubernetes' objects ask for, whatever is away or refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.cli.admin_client import Admin, NoController
from cluster.kubernetes import KubernetesApi
from cluster.scale_adapter import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    AdminCluster,
    Change,
    Demand,
    ScaleAdapter,
    Wanted,
    main,
)
from cluster.testing.kubernetes_api import FakeKubernetes, Manifest, served
from planner.pool_forecast import PoolSizes
from router.testing.stub_worker import until
from tandem.errors import ConfigError, UnavailableError
from tandem.v1 import cluster_pb2

RESOURCE = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "files" / "pools.tandem.dev.yaml"


def strict(schema: Any) -> Any:
    """Kubernetes drops fields that the schema lacks; here they are errors."""
    if isinstance(schema, dict):
        schema = {key: strict(value) for key, value in schema.items()}
        return schema | {"additionalProperties": False} if "properties" in schema else schema
    return schema


DEFINITION, *ACCESS = yaml.safe_load_all(RESOURCE.read_text())
(VERSION,) = DEFINITION["spec"]["versions"]
SCHEMA = strict(VERSION["schema"]["openAPIV3Schema"])
SCHEMA["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}


def check(pool: Manifest) -> None:
    """As the API server does, the rule included."""
    try:
        jsonschema.validate(pool, SCHEMA)
    except jsonschema.ValidationError as error:
        raise ValueError(str(error)) from None
    if pool["spec"]["role"] == "decode" and pool["spec"].get("replicas", 1) < 1:
        raise ValueError("replicas: expected at least 1 for role decode")


def pool(name: str, role: str, model: str = "tiny", release: str = "demo", **spec: Any) -> Manifest:
    return {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "Pool",
        "metadata": {"name": name},
        "spec": {"release": release, "model": model, "role": role, **spec},
    }


class FakeCluster:
    """`sizes` that it was last asked to have, by model. A scale takes a moment, or as long as its model is `held`."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        self.sizes = {model: PoolSizes(*pair) for model, pair in sizes.items()}
        self.asked: list[tuple[str, Wanted]] = []
        self.asked_s: list[float] = []
        self.error: Exception | None = None
        self.away = ""
        self.held: set[str] = set()
        self.cancelled: list[str] = []

    async def status(self) -> cluster_pb2.ClusterStatus:
        if self.away:
            raise UnavailableError(self.away)
        status = cluster_pb2.ClusterStatus()
        for model, sizes in self.sizes.items():
            status.models.add(name=model, prefill=sizes.prefill, decode=sizes.decode)
            for role, count in zip((cluster_pb2.ROLE_PREFILL, cluster_pb2.ROLE_DECODE), sizes, strict=True):
                for number in range(count):
                    info = cluster_pb2.WorkerInfo(worker_id=f"{role}-{number}", model=model, role=role)
                    status.workers.add(info=info, state="starting" if number == 2 else "ready")
        status.workers.add(info=cluster_pb2.WorkerInfo(model="tiny", role=cluster_pb2.ROLE_DECODE), state="failed")
        return status

    async def scale(self, model: str, wanted: Wanted) -> None:
        self.asked.append((model, wanted))
        self.asked_s.append(asyncio.get_running_loop().time())
        before = self.sizes[model]
        self.sizes[model] = PoolSizes(*(old if new is None else new for old, new in zip(before, wanted, strict=True)))
        try:
            await asyncio.sleep(0.03)
            while model in self.held:
                await asyncio.sleep(0.002)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled.append(model)
            self.sizes[model] = before
            raise
        except Exception:
            self.sizes[model] = before
            raise


@contextmanager
def kubernetes(*pools: Manifest) -> Iterator[tuple[FakeKubernetes, KubernetesApi]]:
    api = FakeKubernetes(check=check)
    for each in pools:
        api.add_pool(each)
    with served(api) as url:
        yield api, KubernetesApi(url, "serving", "demo")


@asynccontextmanager
async def adapting(client: Any, cluster: FakeCluster, settle_s: float = 0.0, **more: Any) -> AsyncIterator[None]:
    running = asyncio.create_task(ScaleAdapter(client, cluster, 0.01, settle_s, **more).run())
    try:
        yield
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def condition(api: FakeKubernetes, name: str) -> tuple[str, str, str]:
    (found,) = api.pools[name].get("status", {}).get("conditions") or [
        dict.fromkeys(("status", "reason", "message"), "")
    ]
    return found["status"], found["reason"], found["message"]


def settled(api: FakeKubernetes, name: str, replicas: int) -> Callable[[], bool]:
    def is_so() -> bool:
        return api.pools[name].get("status", {}).get("replicas") == replicas and condition(api, name)[1] == "Scaled"

    return is_so


async def test_a_pool_without_a_size_gets_the_present_one_and_its_status() -> None:
    cluster = FakeCluster(tiny=(1, 3))
    with kubernetes(pool("p", "prefill"), pool("d", "decode"), pool("other", "decode", release="other")) as (
        api,
        client,
    ):
        async with adapting(client, cluster):
            await until(lambda: settled(api, "p", 1)() and settled(api, "d", 3)())
        assert [api.pools[name]["spec"].get("replicas") for name in ("p", "d", "other")] == [1, 3, None]
        status = api.pools["d"]["status"]
        assert (status["ready"], status["selector"]) == (2, "tandem.dev/pool=uid-d")
        assert status["conditions"][0]["observedGeneration"] == api.pools["d"]["metadata"]["generation"]
        assert "status" not in api.pools["other"], "another release's"
        assert cluster.asked == []
        writes = len([each for each in api.asked if each[0] == "PATCH"])
        async with adapting(client, cluster):
            await asyncio.sleep(0.1)
        assert len([each for each in api.asked if each[0] == "PATCH"]) == writes, "nothing changed: nothing is written"


async def test_both_pools_of_a_model_change_in_one_call() -> None:
    cluster = FakeCluster(tiny=(2, 1), other=(1, 1))
    pools = pool("p", "prefill"), pool("d", "decode"), pool("o", "decode", "other")
    with kubernetes(*pools) as (api, client):

        def scale_the_other(_: bool) -> None:
            """As soon as the first waits: no machine is too slow for that."""
            if condition(api, "d")[1] == "Waiting" and api.pools["p"]["spec"]["replicas"] == 2:
                api.scale("p", 1)

        async with adapting(client, cluster, settle_s=0.3, on_round=scale_the_other):
            await until(settled(api, "d", 1))
            api.scale("d", 2)
            await until(settled(api, "d", 2))
            await until(settled(api, "p", 1))
            api.scale("o", 2)
            await until(settled(api, "o", 2))
    assert cluster.asked == [("tiny", (1, 2)), ("other", (None, 2))]


async def test_a_cluster_that_has_lost_its_sizes_gets_them_again() -> None:
    """A new head without a record begins with those of its spec."""
    cluster = FakeCluster(tiny=(0, 0))
    with kubernetes(pool("p", "prefill", replicas=2), pool("d", "decode")) as (api, client):
        async with adapting(client, cluster):
            await until(lambda: condition(api, "d")[1] == "Starting")
            assert (cluster.asked, api.pools["d"]["spec"].get("replicas")) == ([], None), "0 is no size yet"
            cluster.sizes["tiny"] = PoolSizes(1, 1)
            await until(settled(api, "p", 2))
    assert cluster.sizes["tiny"] == (2, 1)


async def test_a_model_whose_change_takes_long_holds_up_no_other() -> None:
    cluster = FakeCluster(tiny=(1, 1), other=(1, 1))
    cluster.held.add("tiny")
    with kubernetes(pool("d", "decode"), pool("o", "decode", "other")) as (api, client):
        async with adapting(client, cluster):
            await until(settled(api, "d", 1))
            api.scale("d", 3)
            await until(
                lambda: condition(api, "d") == ("False", "Scaling", "the controller is asked for 3 decode workers")
            )
            api.scale("o", 2)
            await until(settled(api, "o", 2))
            api.scale("d", 4)  # asked for when the first change is over: its workers are loading
            await asyncio.sleep(0.05)
            assert cluster.asked == [("tiny", (None, 3)), ("other", (None, 2))]
            cluster.held.clear()
            await until(settled(api, "d", 4))
            cluster.held.add("tiny")
            api.scale("d", 9)
            await until(lambda: ("tiny", (None, 9)) in cluster.asked)
            api.scale("d", 4)  # there was no room, and now none is needed
            await until(settled(api, "d", 4))
            await until(lambda: cluster.cancelled == ["tiny"])
            api.scale("d", 5)
            await until(lambda: ("tiny", (None, 5)) in cluster.asked)
        assert cluster.cancelled == ["tiny", "tiny"], "its end ends its calls"


async def test_a_refused_size_is_told_with_the_controllers_words_and_disturbs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(tiny=(1, 1))
    cluster.error = ConfigError("tiny: 7 more workers: about 3 GB of memory, got 2")
    with kubernetes(pool("p", "prefill"), pool("d", "decode")) as (api, client):
        async with adapting(client, cluster):
            await until(settled(api, "d", 1))
            api.scale("d", 8)
            await until(
                lambda: condition(api, "d") == ("False", "Refused", "tiny: 7 more workers: about 3 GB of memory, got 2")
            )
            await asyncio.sleep(0.1)
            assert len(cluster.asked) == 1, "it is not asked again at once"
            assert sum("more workers" in message for message in caplog.messages) == 1, "nor is it told again"
            assert condition(api, "p") == ("True", "Scaled", "")
            cluster.error = None
            api.scale("d", 2)
            await until(settled(api, "d", 2))
    assert cluster.asked[1:] == [("tiny", (1, 2))]


async def test_a_size_that_is_refused_again_and_again_is_asked_for_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.scale_adapter.FIRST_RETRY_S", 0.1)
    cluster = FakeCluster(tiny=(1, 1))
    cluster.error = ConfigError("no room")
    with kubernetes(pool("d", "decode", replicas=2)) as (api, client):
        seen: list[tuple[str, str, str]] = []
        async with adapting(client, cluster, on_round=lambda _: seen.append(condition(api, "d"))):
            await until(lambda: len(cluster.asked) == 5)
    waits_s = [after - before for before, after in pairwise(cluster.asked_s)]
    assert all(wait_s >= 0.1 * 2**number for number, wait_s in enumerate(waits_s)), waits_s
    refused = ("False", "Refused", "no room")
    assert set(seen[seen.index(refused) :]) == {refused}


class LateStatus(FakeCluster):
    """A status that is made while a call is under way arrives when that has ended."""

    async def status(self) -> cluster_pb2.ClusterStatus:
        made = await super().status()
        if self.asked and self.held:
            self.held.clear()
            await asyncio.sleep(0.1)
        return made


async def test_a_status_of_before_a_refusal_is_taken_for_no_success() -> None:
    cluster = LateStatus(tiny=(1, 1))
    cluster.held.add("tiny")
    cluster.error = ConfigError("no room")
    seen: list[str] = []
    with kubernetes(pool("d", "decode", replicas=2)) as (api, client):
        async with adapting(client, cluster, on_round=lambda _: seen.append(condition(api, "d")[1])):
            await until(lambda: "Refused" in seen)
            await asyncio.sleep(0.2)
    assert len(cluster.asked) == 1, "it is not asked again at once"
    assert "Scaled" not in seen
    assert set(seen[seen.index("Refused") :]) == {"Refused"}


async def test_a_call_that_loses_its_controller_is_no_refusal_and_made_again() -> None:
    cluster = FakeCluster(tiny=(1, 1))
    cluster.held.add("tiny")
    seen: list[str] = []
    with kubernetes(pool("d", "decode", replicas=2)) as (api, client):
        async with adapting(client, cluster, on_round=lambda _: seen.append(condition(api, "d")[1])):
            await until(lambda: bool(cluster.asked))
            cluster.away, cluster.error = "no controller answers", NoController("no controller answers")
            cluster.held.clear()
            await until(lambda: cluster.sizes["tiny"] == (1, 1) and condition(api, "d")[1] == "ControllerAway")
            cluster.away, cluster.error = "", None
            await until(settled(api, "d", 2))
    assert "Refused" not in seen
    assert cluster.asked == [("tiny", (None, 2))] * 2


async def test_a_head_that_is_away_is_told_in_words_of_a_release() -> None:
    cluster = AdminCluster(Admin("127.0.0.1:1"))
    with pytest.raises(NoController, match=r"^no controller answers at 127.0.0.1:1: is the head pod ready\?$"):
        await cluster.status()
    with pytest.raises(NoController, match=r"^no controller answers"):
        await cluster.scale("tiny", (None, 2))


async def test_it_is_alive_when_it_has_asked_for_the_pools() -> None:
    """However long its round takes, with a head that answers late or many Pools to write."""
    cluster, looks = FakeCluster(tiny=(1, 1)), list[str]()
    with kubernetes(pool("d", "decode")) as (api, client):
        async with adapting(client, cluster, on_look=lambda: looks.append(condition(api, "d")[1])):
            await until(lambda: len(looks) > 1)
    assert looks[0] == "", "before anything is written"


async def test_a_bug_in_a_call_is_a_refusal_and_not_the_end() -> None:
    cluster = FakeCluster(tiny=(1, 1))
    cluster.error = RuntimeError("unexpected")
    with kubernetes(pool("d", "decode", replicas=2)) as (api, client):
        async with adapting(client, cluster):
            await until(lambda: condition(api, "d") == ("False", "Refused", "RuntimeError: unexpected"))


async def test_pools_that_name_what_is_not_there_or_is_taken_say_so() -> None:
    cluster = FakeCluster(tiny=(1, 1), other=(1, 1))
    pools = pool("d", "decode", replicas=2), pool("again", "decode", replicas=3), pool("lost", "prefill", "gone")
    with kubernetes(*pools) as (api, client):
        async with adapting(client, cluster):
            await until(settled(api, "d", 2))
            await until(lambda: condition(api, "lost")[1] == "NoSuchModel")
            assert condition(api, "lost")[2] == "spec.model: expected one of tiny, other, got 'gone'"
            assert condition(api, "again")[:2] == ("False", "Duplicate")
            assert condition(api, "again")[2].startswith("d is older and has the same model and role")
    assert cluster.asked == [("tiny", (None, 2))]


async def test_a_head_that_is_away_is_told_once_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = FakeCluster(tiny=(1, 2))
    rounds: list[bool] = []
    with kubernetes(pool("d", "decode")) as (api, client):
        async with adapting(client, cluster, on_round=rounds.append):
            await until(settled(api, "d", 2))
            cluster.away = "no controller answers"
            api.scale("d", 1)
            await until(lambda: condition(api, "d") == ("False", "ControllerAway", cluster.away))
            await asyncio.sleep(0.1)
            assert api.pools["d"]["status"]["replicas"] == 2, "what was last known"
            assert rounds[-1] is False
            assert caplog.messages.count(f"controller: {cluster.away}") == 1
            cluster.away = ""
            await until(settled(api, "d", 1))
            assert "controller: as it should be again" in caplog.messages
            assert rounds[-1] is True


@pytest.mark.parametrize("code", [403, 404, 409, 410, 422, 500, 503])
async def test_whatever_the_api_server_answers_it_goes_on(code: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = FakeCluster(tiny=(1, 1))
    with kubernetes(pool("d", "decode")) as (api, client):
        api.errors, api.patch_errors = [code] * 3, [code] * 3
        async with adapting(client, cluster):
            await until(settled(api, "d", 1))
            assert not api.errors + api.patch_errors
            said = [message for message in caplog.messages if message.startswith("Kubernetes: ")]
            assert (len(said), said[1]) == (2, "Kubernetes: as it should be again"), (
                "once when it begins, once when it ends"
            )
            api.scale("d", 2)
            await until(settled(api, "d", 2))


async def test_a_write_that_comes_too_late_is_made_again() -> None:
    """The autoscaler wrote first: its size counts, and not the one that was read before."""
    api = FakeKubernetes(check=check)
    api.add_pool(pool("d", "decode"))
    with served(api) as url:
        client = KubernetesApi(url, "serving", "demo")
        (old,) = client.pools()
        api.scale("d", 3)
        client.set_replicas(old, 1)
        client.set_status(old, {"replicas": 1})
        assert api.pools["d"]["spec"]["replicas"] == 3
        assert "status" not in api.pools["d"]
        del api.pools["d"]
        client.set_replicas(old, 1)
        api.errors = [403]
        with pytest.raises(
            ConfigError, match=r"refuses to PATCH \(403\): expected a Role with patch of pools.tandem.dev/status"
        ):
            client.set_status(old, {})
        api.errors = [404]
        with pytest.raises(
            ConfigError, match=r"has no pools.tandem.dev: apply the chart's files/pools.tandem.dev.yaml"
        ):
            client.pools()


def test_the_api_server_itself_refuses_sizes_that_never_work() -> None:
    api = FakeKubernetes(check=check)
    api.add_pool(pool("d", "decode"))
    api.add_pool(pool("p", "prefill"))
    api.scale("p", 0)
    for name, size in (("d", 0), ("p", -1), ("p", 5000)):
        with pytest.raises(ValueError, match=r"replicas|-1|5000"):
            api.scale(name, size)
    with pytest.raises(ValueError, match="both"):
        api.add_pool(pool("b", "both"))


def test_a_refused_size_is_tried_again_ever_later_or_when_something_changes() -> None:
    demand, now_s, tries = Demand(settle_s=5), 0.0, []
    have = PoolSizes(1, 1)
    assert not demand.is_due((1, 1), have, now_s)
    while now_s < 1000:
        if demand.is_due((1, 2), have, now_s):
            tries.append(now_s)
            demand.refused("no room", now_s)
        now_s += 1
    waits = [after - before for before, after in pairwise(tries)]
    assert tries[0] == 5
    assert waits[:5] == [FIRST_RETRY_S * 2**n for n in range(5)]
    assert max(waits) == LAST_RETRY_S
    assert demand.is_due((1, 2), PoolSizes(2, 1), now_s), "the cluster changed, as if a node came"
    demand.refused("no room", now_s)
    assert not demand.is_due((1, 3), have, now_s)
    assert demand.is_due((1, 3), have, now_s + 5), "another size, which stayed"
    demand.refused("no room", now_s)
    assert not demand.is_due((1, 1), have, now_s)
    assert demand.refusal == ""


async def test_a_call_is_obsolete_only_if_it_starts_what_is_no_longer_asked_for() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    for before, target, wanted, is_obsolete in (
        ((1, 1), (1, 3), (1, 2), True),
        ((1, 1), (1, 3), (1, 4), False),
        ((1, 1), (1, 3), (2, 3), False),
        ((1, 3), (1, 1), (1, 2), False),
        ((2, 1), (1, 2), (2, 1), True),
        ((1, 1), (None, 3), (None, 1), True),
        ((1, 1), (1, 3), (None, None), False),
    ):
        assert Change(PoolSizes(*before), target, task).is_obsolete(wanted) == is_obsolete
    await task


def test_outside_kubernetes_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--namespace", "n", "--release", "r", "--controller", "h:1"]) == 1
    assert "KUBERNETES_SERVICE_HOST" in capsys.readouterr().err
