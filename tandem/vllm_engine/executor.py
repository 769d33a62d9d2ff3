"""vLLM's executor over a worker's ranks, which are processes that Tandem starts. Each has a whole engine core, and all
make the same KV cache of it; from then on only rank 0 schedules, and the others run its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, replace_as

from tandem.engine.tp_group import TpGroup
from tandem.errors import WorkerLost
from tandem.telemetry.resource_watch import SHARED_MEMORY
from tandem.vllm_engine.first_runner import last_states
from tandem.vllm_engine.steps import Pixels, decode, decode_masks, encode, encode_masks

_BEAT, _STOP = b"beat", b"stop"


class RankExecutor(UniProcExecutor):  # type: ignore[misc]
    """A subclass for each rank (`executor_of`) says which one it is."""

    index = 0
    rendezvous_file = Path()
    group_name = ""  # of no other worker on this host, and of no earlier life: memory that the ranks share has it

    def _init_executor(self) -> None:
        size = self.parallel_config.world_size
        self._group: TpGroup | None = None
        self._is_constrained = False  # the last step
        self.embeddings: dict[str, bytes] = {}  # of requests that want theirs; empty until they have a step
        if size > 1:
            self._group = TpGroup(self.rendezvous_file, self.index, size, torch.device("cpu"))
        super()._init_executor()
        for path in SHARED_MEMORY.glob(f"{self.group_name}-*"):  # all have mapped it; a killed rank would leave it
            path.unlink(missing_ok=True)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Layers with a window keep the KV of all tokens, which a handoff sends, and still read no more than their
        window. vLLM does the same where only some layers have one."""
        return [{name: _whole(spec) for name, spec in specs.items()} for specs in super().get_kv_cache_specs()]

    def _distributed_args(self) -> tuple[str, int, int]:
        return f"file://{self.rendezvous_file.parent / self.group_name}", self.index, self.index

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Each rank calls its own worker. What all return is the same: they have equal shards."""
        own = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        return own if single_value or non_block else own * self.parallel_config.world_size

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if self._group is not None:
            self._group.send(encode(scheduler_output, self._features))
        self._is_constrained = scheduler_output.has_structured_output_requests
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """All ranks draw, so all need what may be drawn."""
        if self.embeddings:
            for request_id, state in last_states(self.driver_worker).items():
                if request_id in self.embeddings:
                    self.embeddings[request_id] = state.float().cpu().numpy().astype("<f4", copy=False).tobytes()
        if self._group is not None and self._is_constrained:
            self._group.send(encode_masks(grammar_output))
        return super().sample_tokens(grammar_output, non_block)

    def beat(self) -> None:
        """Tells the ranks that wait for a step that this one lives."""
        if self._group is not None:
            self._group.send(_BEAT)

    def follow(self) -> None:
        """Runs the steps of rank 0 until it stops. Raises WorkerLost without it."""
        if self._group is None:
            return
        messages = self._group.messages()
        for message in messages:
            if message == _STOP:
                return
            if message == _BEAT:
                continue
            step, pixels = decode(message)
            with self._read_by(step, pixels):
                drawn = self.driver_worker.execute_model(step)
            if drawn is None:
                masks = decode_masks(_next_but_beats(messages)) if step.has_structured_output_requests else None
                self.driver_worker.sample_tokens(masks)

    def _features(self, request_id: str) -> list[MultiModalFeatureSpec]:
        """Of a request that vLLM's runner knows."""
        features: list[MultiModalFeatureSpec] = self.driver_worker.model_runner.requests[request_id].mm_features
        return features

    @contextmanager
    def _read_by(self, step: Any, pixels: Pixels) -> Iterator[None]:
        """Requests have the pixels of their images for the step that reads them alone."""
        new = {each.req_id: each.mm_features for each in step.scheduled_new_reqs}
        read = [
            (features := new.get(request_id) or self._features(request_id), number, features[number], item)
            for request_id, items in pixels.items()
            for number, item in items.items()
        ]
        for features, number, feature, item in read:
            features[number] = replace(feature, data=item)
        try:
            yield
        finally:
            for features, number, feature, _ in read:
                features[number] = feature

    def shutdown(self) -> None:
        if self._group is not None:
            if self.index == 0:
                with suppress(WorkerLost):
                    self._group.send(_STOP)
            self._group.close()
            self._group = None
        super().shutdown()


def _next_but_beats(messages: Iterator[bytes]) -> bytes:
    return next(message for message in messages if message != _BEAT)


def _whole(spec: KVCacheSpec) -> KVCacheSpec:
    if type(spec) is SlidingWindowSpec:
        return replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens",))
    return spec


def executor_of(rendezvous: Path, rank: int, name: str) -> type[RankExecutor]:
    class Executor(RankExecutor):
        index, rendezvous_file, group_name = rank, rendezvous, name

    return Executor
