"""One pod after another, and only while all workers serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cluster.kubernetes import KubernetesApi, Pod
from cluster.rollout import Rollout, Wanted, main
from cluster.testing.kubernetes_api import FakeKubernetes, served
from tandem.errors import ConfigError, UnavailableError

WANTED = [Wanted("head", 1, "new"), Wanted("node/nodes", 2, "new")]


FORMER = "node/former"


def component_of(name: str) -> str:
    return "head" if name.startswith("head") else "node/nodes"


class Site:
    """Pods. A deleted one is gone at the second look, its successor is there then and ready a look later. Workers serve
    again at the third question after a deletion. Pods of a former group have no successors."""

    def __init__(self, *names: str, template: str = "new", works: bool = True) -> None:
        self.pods = {name: Pod(name, f"uid-{name}", component_of(name), "old", True, False) for name in names}
        self.template, self.works = template, works
        self.deleted: list[str] = []
        self.workers_away = 0
        self._turns = 0

    def list(self) -> list[Pod]:
        seen = list(self.pods.values())
        for name, pod in list(self.pods.items()):
            if pod.is_ending:
                del self.pods[name]
                if pod.component == FORMER:
                    continue
                self._turns += 1
                new = f"{pod.name.partition('-')[0]}-n{self._turns}"
                self.pods[new] = Pod(new, f"uid-{new}", pod.component, self.template, False, False)
            elif not pod.is_ready and self.works:
                self.pods[name] = Pod(name, pod.uid, pod.component, pod.template, True, False)
        return seen

    def delete(self, pod: Pod) -> None:
        assert sum(each.is_ready for each in self.pods.values()) == len(self.pods) or not pod.is_ready
        assert not self.workers_away or not pod.is_ready
        self.deleted.append(pod.name)
        self.pods[pod.name] = Pod(pod.name, pod.uid, pod.component, pod.template, False, True)
        self.workers_away = 2

    async def unready(self) -> str:
        if self.workers_away:
            self.workers_away -= 1
            return "decode-0 is restarting"
        return ""


def rollout(site: Site, timeout_s: float = 30.0) -> Rollout:
    return Rollout(site, site.unready, WANTED, timeout_s, poll_s=0.001)


async def test_the_head_comes_first_and_then_one_node_after_another() -> None:
    site = Site("head-a", "node-a", "node-b")
    assert await rollout(site).run() == 3
    assert site.deleted == ["head-a", "node-a", "node-b"]
    assert {pod.template for pod in site.pods.values()} == {"new"}
    assert await rollout(site).run() == 0, "again: nothing to do"


async def test_a_change_that_cannot_work_stops_at_its_first_pod_and_can_be_taken_back() -> None:
    site = Site("head-a", "node-a", "node-b", works=False)
    with pytest.raises(UnavailableError, match=r"stopped after 0\.05 s .*0 of 1 head pod ready.*helm rollback"):
        await rollout(site, 0.05).run()
    assert site.deleted == ["head-a"]
    site.template, site.works = "old", True
    back = Rollout(site, site.unready, [Wanted("head", 1, "old"), Wanted("node/nodes", 2, "old")], 30.0, poll_s=0.001)
    assert await back.run() == 1
    assert {pod.template for pod in site.pods.values()} == {"old"}


async def test_a_controller_that_is_away_is_waited_for_and_a_missing_right_is_not() -> None:
    site, calls = Site("head-a", "node-a", "node-b"), 0

    async def unready() -> str:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise UnavailableError("--address: no controller answers")
        return await site.unready()

    assert await Rollout(site, unready, WANTED, 30.0, poll_s=0.001).run() == 3

    class Refused(Site):
        def list(self) -> list[Pod]:
            raise ConfigError("serviceAccount: the API server refuses to GET pods (403)")

    with pytest.raises(ConfigError, match="refuses"):
        await rollout(Refused("head-a")).run()


async def test_pods_of_a_removed_group_go_last() -> None:
    """KubeRay leaves them alone."""
    site = Site("head-a", "node-a", "node-b")
    site.pods["former-a"] = Pod("former-a", "uid-former-a", FORMER, "old", True, False)
    assert await rollout(site).run() == 4
    assert site.deleted == ["head-a", "node-a", "node-b", "former-a"]


async def test_nodes_that_have_lost_their_head_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Their workers serve, but Ray says that no node is ready. A head that never comes back must not cost them."""
    site = Site("head-a", "node-a", "node-b", works=False)
    site.pods["head-a"] = Pod("head-a", "uid-head-a", "head", "new", False, False)
    for name in ("node-a", "node-b"):
        site.pods[name] = Pod(name, f"uid-{name}", "node/nodes", "old", False, False)
    with pytest.raises(UnavailableError, match="0 of 1 head pod ready"):
        await rollout(site, 0.05).run()
    assert site.deleted == []
    site.pods["head-a"] = Pod("head-a", "uid-head-a", "head", "new", True, False)
    with pytest.raises(UnavailableError, match="0 of 2 node/nodes pods ready"):
        await rollout(site, 0.05).run()
    assert site.deleted == [], "they have not noticed it yet"
    broken = Rollout(site, site.unready, WANTED, 1.0, poll_s=0.001, broken_s=0.001)
    with pytest.raises(UnavailableError, match="of 2 node/nodes pods ready"):
        await broken.run()
    assert site.deleted == ["node-a", "node-b"], "not ready with a head for so long: broken themselves"


async def test_a_ray_cluster_that_keeps_the_earlier_template_stops_it() -> None:
    site = Site("head-a", "node-a", "node-b", template="old")
    with pytest.raises(UnavailableError, match="stopped after 4 head pods: the new ones have the earlier template too"):
        await rollout(site).run()


def pod(name: str, component: str, template: str, *, ready: bool) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"app.kubernetes.io/component": component},
            "annotations": {"tandem/template": template},
        },
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def test_pods_are_asked_for_and_deleted_as_kubernetes_has_it() -> None:
    api = FakeKubernetes(
        pod("a", "head", "old", ready=True), {"metadata": {"name": "b", "uid": "u", "deletionTimestamp": "now"}}
    )
    with served(api) as url:
        client = KubernetesApi(url, "serving", "demo")
        first, second = client.list()
        assert first == Pod("a", "uid-a", "head", "old", is_ready=True, is_ending=False)
        assert second == Pod("b", "u", "", "", is_ready=False, is_ending=True)
        client.delete(first)
        api.errors = [409, 404]
        client.delete(first)
        client.delete(first)
        (listed, deleted, *_) = api.asked
        assert listed[0] == "GET"
        assert parse_qs(urlsplit(listed[1]).query) == {
            "labelSelector": ["app.kubernetes.io/instance=demo,app.kubernetes.io/part-of=tandem"]
        }
        assert deleted == ("DELETE", "/api/v1/namespaces/serving/pods/a", {"preconditions": {"uid": "uid-a"}})
        api.errors = [403, 500]
        with pytest.raises(ConfigError, match="expected a Role with list and delete of pods"):
            client.list()
        with pytest.raises(UnavailableError, match="answered 500"):
            client.list()
    with pytest.raises(UnavailableError, match="does not answer"):
        client.list()


def test_outside_kubernetes_it_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        KubernetesApi.of_this_pod("serving", "demo", {})
    with pytest.raises(SystemExit):
        main(["--namespace", "n", "--release", "r", "--controller", "h:1", "--pods", "head:new"])
    assert "expected COMPONENT:COUNT:TEMPLATE, got 'head:new'" in capsys.readouterr().err
    with served(FakeKubernetes()) as url:
        given = ["--namespace", "n", "--release", "r", "--controller", "127.0.0.1:9", "--pods", "head:1:x"]
        assert main([*given, "--api", url, "--step-timeout", "0"]) == 0, "nothing to replace"
    outdated = FakeKubernetes(pod("a", "head", "old", ready=True), pod("b", "node", "old", ready=True))
    with served(outdated) as url:
        assert main([*given, "--api", url, "--step-timeout", "0"]) == 3
    assert "stopped after 0 s before a is replaced: --address: no controller answers" in capsys.readouterr().err
