"""Reads slices of named tensors from a Hugging Face checkpoint directory. Safetensors only, so nothing is unpickled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.checkpoint.json_fields import read_json_object
from tandem.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_BODY, _EMBEDDING = "model.", "embed_tokens.weight"
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors")


class Checkpoint:
    """Open it with `Checkpoint.open`. Every error is a CheckpointError naming the tensor and the file."""

    def __init__(
        self,
        files: dict[str, tuple[Path, Any]],
        model_dir: Path,
        device: torch.device | None = None,
        *,
        is_body: bool = False,
    ) -> None:
        self._is_body = is_body
        self._device = device or torch.device("cpu")
        self._files = files
        self._model_dir = model_dir
        self._unread = set(files)

    @classmethod
    @contextmanager
    def open(
        cls, model_dir: Path, device: torch.device | None = None, *, may_be_body: bool = False
    ) -> Iterator[Checkpoint]:
        """`device`: where tensors are read to; None: the CPU. `may_be_body`: names may lack the model around them, as
        sentence-transformers writes them."""
        with ExitStack() as stack:
            files: dict[str, tuple[Path, Any]] = {}
            for path, promised in _files(model_dir).items():
                opened = stack.enter_context(_opened(path))
                held = set(opened.keys())
                missing = sorted(promised - held)
                if missing:
                    raise CheckpointError(f"{path}: expected tensor {missing[0]}, listed in {INDEX_FILE}, found none")
                files.update({name: (path, opened) for name in (promised or held)})
            is_body = may_be_body and _EMBEDDING in files
            if is_body:
                files = {f"{_BODY}{name}": each for name, each in files.items()}
            yield cls(files, model_dir, device, is_body=is_body)

    @classmethod
    @contextmanager
    def open_file(cls, path: Path) -> Iterator[Checkpoint]:
        """One file with a name of its own."""
        with _opened(path) as opened:
            yield cls({name: (path, opened) for name in set(opened.keys())}, path)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def unread(self) -> frozenset[str]:
        """Names that were neither read nor left to another rank, which the model would silently ignore."""
        return frozenset(self._unread)

    def leave(self, name: str) -> None:
        """Marks a tensor as read by another rank, or as not needed."""
        self._unread.discard(name)

    def file_of(self, name: str) -> Path:
        return self._files[name][0]

    def _stored(self, name: str) -> str:
        """Its name in the file."""
        return name.removeprefix(_BODY) if self._is_body else name

    def read_ids(self, name: str, count: int) -> Tensor:
        """Reads `count` integers, as int64."""
        if name not in self._files:
            raise CheckpointError(f"{self._model_dir}: expected tensor {name} of {count} integers, found none")
        path, opened = self._files[name]
        self._unread.discard(name)
        try:
            found: Tensor = opened.get_tensor(self._stored(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: expected a readable tensor, got: {error}") from error
        if list(found.shape) != [count] or found.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(
                f"{path}: {name}: expected {count} integers, got {found.dtype} of shape {list(found.shape)}"
            )
        return found.to(self._device, torch.int64)

    def read(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        """Reads a tensor that must have `shape`, or its `rows` and `columns`, in the file's dtype."""
        if name not in self._files:
            raise CheckpointError(f"{self._model_dir}: expected tensor {name} of shape {list(shape)}, found none")
        path, opened = self._files[name]
        self._unread.discard(name)
        try:
            whole = opened.get_slice(self._stored(name))
            if list(whole.get_shape()) != list(shape):
                raise CheckpointError(
                    f"{path}: {name}: expected shape {list(shape)} from config.json, got {list(whole.get_shape())}"
                )
            if whole.get_dtype() not in _FLOATS:
                raise CheckpointError(f"{path}: {name}: expected one of {', '.join(_FLOATS)}, got {whole.get_dtype()}")
            index = (rows or slice(None), columns or slice(None))[: len(shape)]
            part: Tensor = whole[index].to(self._device)  # where the next check takes no time
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {name}: expected a readable tensor, got: {error}") from error
        if not torch.isfinite(part.sum(dtype=torch.float32 if part.dtype != torch.float64 else torch.float64)):
            raise CheckpointError(f"{path}: {name}: expected finite numbers, got NaN or infinity; the file is corrupt")
        return part


def _files(model_dir: Path) -> dict[Path, set[str]]:
    """Each weight file with the tensors that the index lists for it; no tensors without an index."""
    if (model_dir / SINGLE_FILE).exists():
        return {model_dir / SINGLE_FILE: set()}
    if not (model_dir / INDEX_FILE).exists():
        raise CheckpointError(f"{model_dir}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither", field="model")
    weight_map = read_json_object(model_dir / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{model_dir / INDEX_FILE}: weight_map: expected a map from tensor names to files, got none"
        )
    found: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointError(f"{model_dir / INDEX_FILE}: {name}: expected a file in this folder, got {file!r}")
        found.setdefault(model_dir / file, set()).add(name)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        manager = safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected this file, listed in {INDEX_FILE}, found none") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected an intact safetensors file, got: {error}; pull it again") from error
    with manager as opened:
        yield opened
