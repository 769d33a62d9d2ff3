"""The adapters that vLLM has loaded.

vLLM reads an adapter's files again whenever its cache had no room for it, and takes a number it knows for what it has:
so each content has files in the cache that do not change, and a number of its own.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from torch import Tensor
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from tandem.engine.api import AdapterFiles
from tandem.errors import ConfigError
from tandem.vllm_engine.settings import first_line


def answer_without_adapter() -> None:
    """On CPUs, vLLM 0.32 takes -1, which says that a token has no adapter, as the place of the last one: beside others,
    the base model would answer with that one's weights. Runs on each rank, before it computes anything."""
    shrink: Any = lora_ops.bgmv_shrink

    def shrink_some(inputs: Tensor, weights: Tensor, output: Tensor, places: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, places, scaling)
        output[places < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_some


class VllmAdapters:
    def __init__(self, core: EngineCore, *, is_enabled: bool) -> None:
        self._core = core
        self._is_enabled = is_enabled
        self._numbers = count(1)
        self._loaded: dict[str, LoRARequest] = {}
        self.fingerprints: frozenset[str] = frozenset()

    def request(self, fingerprint: str) -> LoRARequest | None:
        """What vLLM's requests have. None: the base model."""
        return self._loaded[fingerprint] if fingerprint else None

    def load(self, adapter: AdapterFiles) -> None:
        """Raises ConfigError."""
        if not self._is_enabled:
            raise ConfigError("adapters: expected none: this worker started without engine.vllm.enable_lora")
        made = LoRARequest(adapter.fingerprint, next(self._numbers), adapter.folder)
        try:
            self._core.add_lora(made)
        except Exception as error:
            self._core.remove_lora(made.lora_int_id)  # what it had begun
            raise ConfigError(f"{adapter.folder}: vLLM cannot load it: {first_line(error)}") from error
        self._loaded[adapter.fingerprint] = made
        self.fingerprints = frozenset(self._loaded)

    def drop(self, fingerprint: str) -> None:
        """No request has it. The other ranks forget it when they need its room."""
        if (gone := self._loaded.pop(fingerprint, None)) is not None:
            self.fingerprints = frozenset(self._loaded)
            self._core.remove_lora(gone.lora_int_id)
