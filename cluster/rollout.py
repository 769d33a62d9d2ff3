"""Replaces the pods of a release that have another template than they should, one after another: the chart's Job
(`upgrade.strategy: rolling`) runs `python -m cluster.rollout`.

The head comes first, so that the newest controller drains the nodes. A pod is replaced when all pods are ready and all
workers serve. One that does not become ready, as after a change that cannot work, is replaced without that.

Exit code 3: it stopped, and another attempt would too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cluster.cli.admin_client import Admin, fetch_status
from cluster.kubernetes import DEFAULT_GROUP, Pod
from cluster.pod_arguments import add_pod_arguments, admin_of, kubernetes_of
from tandem.errors import ConfigError, TandemError, UnavailableError
from tandem.text.words import plural

log = logging.getLogger(__name__)

POLL_S = 2.0
BROKEN_S = 300.0  # nodes ask the head's Ray whether they are ready, and may take a minute to notice a new head
MORE_DELETIONS = 3  # than there are outdated pods: KubeRay may hear of a new template after this process
STOPPED_EXIT_CODE = 3


class Pods(Protocol):
    def list(self) -> list[Pod]: ...
    def delete(self, pod: Pod) -> None: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pods of a component as they should be."""

    component: str
    count: int
    template: str

    @classmethod
    def parse(cls, text: str) -> Wanted:
        component, _, rest = text.partition(":")
        count, _, template = rest.partition(":")
        if not component or not count.isdigit() or not template:
            raise argparse.ArgumentTypeError(f"expected COMPONENT:COUNT:TEMPLATE, got {text!r}")
        return cls(f"node/{DEFAULT_GROUP}" if component == "node" else component, int(count), template)


class Rollout:
    """`unready`: names the workers that do not serve; empty if all do. Raises TandemError if it cannot be known."""

    def __init__(
        self,
        pods: Pods,
        unready: Callable[[], Awaitable[str]],
        wanted: Sequence[Wanted],
        step_timeout_s: float,
        poll_s: float = POLL_S,
        broken_s: float = BROKEN_S,
    ) -> None:
        self._pods = pods
        self._unready = unready
        self._wanted = wanted
        self._step_timeout_s = step_timeout_s
        self._poll_s = poll_s
        self._broken_s = broken_s
        self._seen: list[Pod] = []
        self._head_since_s: float | None = None  # since when a head of the wanted template has been ready

    async def run(self) -> int:
        """Returns how many pods were replaced. Raises UnavailableError if one step takes too long: pods that were not
        reached keep their template."""
        replaced = 0
        for each in self._wanted:
            await self._until(self._unlisted, "at the start")
            most = len(self._outdated(each)) + MORE_DELETIONS
            for number in itertools.count():
                if not (outdated := self._outdated(each)):
                    break
                if number == most:
                    raise UnavailableError(
                        f"stopped after {number} {each.component} pods: the new ones have the earlier template too: "
                        "does the RayCluster have the present one?"
                    )
                await self._replace(min(outdated, key=lambda pod: (pod.is_ready, pod.name)))
                replaced += 1
        for pod in self._of_removed_groups():
            await self._replace(pod)
            replaced += 1
        if replaced:
            await self._until(self._unsettled, "at the end")
        return replaced

    async def _replace(self, pod: Pod) -> None:
        await self._until(partial(self._irreplaceable, pod), f"before {pod.name} is replaced")
        log.info("replacing %s (%s)", pod.name, pod.component)
        await self._until(partial(self._undeleted, pod), f"to delete {pod.name}")
        await self._until(partial(self._remaining, pod), f"after {pod.name} was deleted")

    async def _irreplaceable(self, pod: Pod) -> str:
        """Why it may not be replaced yet. A head that is not ready serves nothing. A node that is not ready may still
        serve: it has perhaps only lost the head, which is being replaced."""
        await self._unlisted()
        now = next((each for each in self._seen if each.uid == pod.uid), None)
        if now is None:
            return ""
        if not now.is_ready and (now.component == self._wanted[0].component or self._has_steady_head()):
            return ""
        return await self._unsettled()

    def _has_steady_head(self) -> bool:
        """For so long that a node which still is not ready is broken itself."""
        since_s = self._head_since_s
        return since_s is not None and asyncio.get_running_loop().time() - since_s > self._broken_s

    def _outdated(self, wanted: Wanted) -> list[Pod]:
        return [
            pod
            for pod in self._seen
            if pod.component == wanted.component and pod.template != wanted.template and not pod.is_ending
        ]

    def _of_removed_groups(self) -> list[Pod]:
        """KubeRay leaves them alone."""
        known = {wanted.component for wanted in self._wanted}
        return [
            pod
            for pod in self._seen
            if pod.component.startswith("node/") and pod.component not in known and not pod.is_ending
        ]

    async def _unlisted(self) -> str:
        self._seen = await asyncio.to_thread(self._pods.list)
        head = self._wanted[0]
        ready = (pod.template for pod in self._seen if pod.component == head.component and pod.is_ready)
        if head.template not in ready:
            self._head_since_s = None
        elif self._head_since_s is None:
            self._head_since_s = asyncio.get_running_loop().time()
        return ""

    async def _undeleted(self, pod: Pod) -> str:
        await asyncio.to_thread(self._pods.delete, pod)
        return ""

    async def _remaining(self, pod: Pod) -> str:
        await self._unlisted()
        return f"{pod.name} is ending" if any(each.uid == pod.uid for each in self._seen) else ""

    async def _unsettled(self) -> str:
        """Why the next pod must wait; empty if it need not."""
        await self._unlisted()
        for wanted in self._wanted:
            ready = [
                pod for pod in self._seen if pod.component == wanted.component and pod.is_ready and not pod.is_ending
            ]
            if len(ready) < wanted.count:
                return f"{len(ready)} of {plural(wanted.count, f'{wanted.component} pod')} ready"
        return await self._unready()

    async def _until(self, waits_for: Callable[[], Awaitable[str]], when: str) -> None:
        """Returns when it gives no reason to wait, and raises nothing that may pass."""
        loop = asyncio.get_running_loop()
        last_s, said = loop.time() + self._step_timeout_s, ""
        while True:
            try:
                reason = await waits_for()
            except ConfigError:
                raise
            except TandemError as error:  # the controller or the API server is away
                reason = error.message
            if not reason:
                return
            if reason != said:
                log.info("waiting: %s", reason)
                said = reason
            if loop.time() > last_s:
                raise UnavailableError(
                    f"stopped after {self._step_timeout_s:g} s {when}: {reason}; the other pods keep their template: "
                    "`helm rollback`; or mend it, delete this Job, and `helm upgrade`"
                )
            await asyncio.sleep(self._poll_s)


async def unready_workers(admin: Admin) -> str:
    workers = (await fetch_status(admin)).workers
    names = [f"{each.info.worker_id} is {each.state}" for each in workers if each.state != "ready"]
    return ", ".join(names) if workers else "the cluster has no worker yet"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.rollout", description="Replaces outdated pods, one by one."
    )
    add_pod_arguments(parser)
    parser.add_argument("--pods", action="append", type=Wanted.parse, required=True, metavar="COMPONENT:COUNT:TEMPLATE")
    parser.add_argument("--step-timeout", type=float, default=1800.0, metavar="SECONDS")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    admin = admin_of(given)
    try:
        rollout = Rollout(kubernetes_of(given), lambda: unready_workers(admin), given.pods, given.step_timeout)
        replaced = asyncio.run(rollout.run())
    except TandemError as error:
        print(error.message, file=sys.stderr)
        return STOPPED_EXIT_CODE
    log.info("done: %s replaced", plural(replaced, "pod"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
