"""Counts nothing: what `observability.metrics.enabled: false` puts in the place of the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtransfer.causes import HandoffCause
from router.admission.admission import Admission
from router.observe.metrics.requests import RouterMetrics
from router.observe.trace import Attempt, Trace
from router.policies.types import PlacementReason, WaitReason
from router.prefix_index.follower import PrefixFollower
from router.prefix_index.mirror import PrefixMirror
from router.requests.output import Final
from tandem.config.spec import ClassSpec
from tandem.errors import ErrorCode, NotFound
from tandem.request import RequestState
from tandem.v1 import worker_pb2


class NoMetrics(RouterMetrics):
    def __init__(self) -> None:
        """Has no registry."""

    def watch_index(self, mirror: PrefixMirror, follower: PrefixFollower | None) -> None: ...

    def watch_admission(self, admission: Admission[Any]) -> None: ...

    def watch_classes(self, classes: Sequence[ClassSpec]) -> None: ...

    def render(self) -> bytes:
        raise NotFound("metrics: observability.metrics.enabled is false in this cluster's configuration")

    def finished(self, model: str, final: Final, trace: Trace) -> None: ...

    def judged(
        self, model: str, priority: str, final: Final | None, state: RequestState, code: ErrorCode | None
    ) -> None: ...

    def gaps(self, model: str, gaps_s: Sequence[float]) -> None: ...

    def ended(self, model: str, state: RequestState, code: ErrorCode | None) -> None: ...

    def handed_off(self, model: str, attempt: Attempt, done: worker_pb2.HandoffDone) -> None: ...

    def handoff_failed(self, model: str, cause: HandoffCause) -> None: ...

    def rejected(self, model: str, code: ErrorCode) -> None: ...

    def placed(self, model: str, reason: PlacementReason) -> None: ...

    def credited(self, model: str, tokens: int, wrong_tokens: int) -> None: ...

    def waited(self, model: str, reason: WaitReason) -> None: ...

    def retried(self, model: str, code: ErrorCode) -> None: ...

    def set_load(self, *, queued: int, running: int) -> None: ...

    def set_workers(self, *, prefill: int, decode: int) -> None: ...
