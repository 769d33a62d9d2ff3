from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from tandem.checkpoint import model_store
from tandem.checkpoint.model_store import pull, resolve
from tandem.errors import CheckpointError, ConfigError, InsufficientMemory
from tandem.files import cache_dir
from tandem.testing.models import write_tiny_llama
from tests.model_hub import ModelHub, model_hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "tandem"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_checkpoint_folder_is_itself(cache: Path, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    assert resolve(str(folder)) == folder
    assert not cache.exists()


@pytest.mark.parametrize("source", ["smollm2-135m", "some-org/some-model"])
def test_a_model_that_is_not_here_says_how_to_get_it(source: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match=f"run `tandem pull {source}` first"):
        resolve(source)


def test_a_name_that_cannot_be_pulled_is_refused_with_those_that_can(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'nothing'; models to pull are smollm2-135m, and those of a model hub"):
        resolve("nothing")


@pytest.mark.parametrize("source", ["/nowhere/at-all", "./at-all", "../at-all", "~/at-all-of-tandem"])
def test_a_path_that_leads_nowhere_is_told_as_such_and_never_looked_up(source: str, cache: Path) -> None:
    for get in (resolve, pull):
        with pytest.raises(ConfigError, match="not found; expected a checkpoint folder") as error:
            get(source)
        assert "tandem pull" not in error.value.message


def test_a_folder_is_not_pulled(cache: Path, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"is a local path: run `tandem up --model {folder}`"):
        pull(str(folder))


def test_what_the_hubs_client_says_is_told_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code = "from tandem.checkpoint.model_store import pull; pull('some-org/some-model')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "from the model hub, got: " in done.stderr
    assert "got: got:" not in done.stderr.lower()


def test_a_gguf_file_that_is_not_there_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a GGUF file at .*none\.gguf, found none"):
        resolve(str(tmp_path / "none.gguf"))


def test_a_damaged_gguf_file_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + os.urandom(100))
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        resolve(str(path))
    assert list((cache / "gguf").iterdir()) == []


def test_a_name_of_no_known_form_is_refused_without_asking_anyone(cache: Path) -> None:
    with pytest.raises(ConfigError, match="expected smollm2-135m or a model hub name like org/name"):
        pull("no such name")


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="set TANDEM_CACHE to another folder"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), r"free in .*cache for my-org/my-llama, got [\d.]+ [GM]iB; free some space or set TANDEM_CACHE"),
        (
            ("--volume-bytes", str(8 << 30)),
            r"free in .*cache for my-org/my-llama, got [78]\.\d GiB; the volume has 8\.0 GiB: make it larger",
        ),
    ],
)
def test_a_model_that_its_disk_has_no_room_for_is_refused_before_it_is_downloaded(
    arguments: tuple[str, ...], said: str, cache: Path, tmp_path: Path
) -> None:
    folder, huge = write_tiny_llama(tmp_path / "model"), {"model.safetensors": 1 << 50, "pytorch_model.bin": 1 << 60}
    with model_hub("my-org/my-llama", folder, huge) as hub:
        done = pulled(hub, *arguments)
    assert done.returncode != 0
    assert re.search(r"expected 1048576\.0 GiB " + said, " ".join(done.stderr.split()))
    assert set(hub.downloaded) <= {"config.json", "generation_config.json"}
    assert [path for path in cache.rglob("*") if path.stat().st_size > 1 << 16 and path.is_file()] == []


def test_a_pulled_model_needs_no_more_room(cache: Path, tmp_path: Path) -> None:
    with model_hub("my-org/my-llama", write_tiny_llama(tmp_path / "model")) as hub:
        room = sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) + (1 << 14)
        for _ in range(2):
            done = pulled(hub, "--volume-bytes", str(room))
            assert done.returncode == 0, done.stderr
    assert sorted(hub.downloaded) == sorted(set(hub.downloaded))


def test_what_was_downloaded_before_an_interruption_counts_as_there(cache: Path, tmp_path: Path) -> None:
    begun = cache / "hub" / "models--my-org--my-llama" / "blobs" / "a.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(bytes(1 << 20))
    size = {"model.safetensors": 3 << 20}
    with model_hub("my-org/my-llama", write_tiny_llama(tmp_path / "model"), size) as hub:
        assert pulled(hub, "--volume-bytes", str(2 << 20)).returncode != 0
        assert pulled(hub, "--volume-bytes", str(4 << 20)).returncode == 0


def pulled(hub: ModelHub, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster", "pull", "my-org/my-llama", *arguments]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_the_demo_model_is_not_downloaded_without_room(cache: Path) -> None:
    with pytest.raises(InsufficientMemory, match=r"expected 619 MiB free in .*cache for smollm2-135m, got 1 MiB"):
        pull("smollm2-135m", volume_bytes=1 << 20)
    assert not cache.exists()


def test_a_pull_takes_the_files_that_say_how_a_model_embeds_and_no_other_formats() -> None:
    files = ["config.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json"]
    others = ["onnx/model.safetensors", "pytorch_model.bin", "2_Dense/model.safetensors", "onnx/config.json"]
    taken = filter_repo_objects(
        files + others, allow_patterns=list(model_store._HUB_FILES), ignore_patterns=list(model_store._HUB_IGNORED)
    )
    assert list(taken) == files
    assert list(filter(model_store._is_wanted, files + others)) == files
