"""The adapters that vLLM has loaded.

vLLM reads an adapter's files again whenever its cache had no room for it, so it gets a copy that nobody changes, and a
number that no other content ever has.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from tandem.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_fingerprint
from tandem.engine.api import AdapterFiles
from tandem.errors import ConfigError
from tandem.vllm_engine.settings import first_line


class VllmAdapters:
    """`folder`: for the copies, of this worker alone; its ranks read them too. None: vLLM runs without adapters."""

    def __init__(self, core: EngineCore, folder: Path | None) -> None:
        self._core = core
        self._folder = folder
        self._numbers = count(1)
        self._loaded: dict[str, LoRARequest] = {}
        self.fingerprints: frozenset[str] = frozenset()

    def request(self, fingerprint: str) -> LoRARequest | None:
        """What vLLM's requests have. None: the base model."""
        return self._loaded[fingerprint] if fingerprint else None

    def load(self, adapter: AdapterFiles) -> None:
        """Raises ConfigError."""
        if self._folder is None:
            raise ConfigError("adapters: expected none: this worker started without engine.vllm.enable_lora")
        copy = self._folder / adapter.fingerprint
        try:
            self._copy(Path(adapter.folder), copy, adapter.fingerprint)
            made = LoRARequest(adapter.fingerprint, next(self._numbers), str(copy))
            self._core.add_lora(made)
        except Exception as error:
            shutil.rmtree(copy, ignore_errors=True)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{adapter.folder}: vLLM cannot load it: {first_line(error)}") from error
        self._loaded[adapter.fingerprint] = made
        self.fingerprints = frozenset(self._loaded)

    def drop(self, fingerprint: str) -> None:
        """No request has it. The other ranks forget it when they need its room."""
        if (gone := self._loaded.pop(fingerprint, None)) is not None:
            self.fingerprints = frozenset(self._loaded)
            self._core.remove_lora(gone.lora_int_id)
            shutil.rmtree(gone.lora_path, ignore_errors=True)

    @staticmethod
    def _copy(source: Path, target: Path, fingerprint: str) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(source / name, target / name)
        if adapter_fingerprint(target) != fingerprint:
            raise ConfigError(f"{source}: its files changed after they were checked: apply the configuration again")
