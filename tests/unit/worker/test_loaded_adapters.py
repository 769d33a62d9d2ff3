"""A worker's adapters follow the directory: loaded one at a time, and kept for a while after they have left it."""

from __future__ import annotations

from pathlib import Path

from tandem.engine.api import AdapterFiles, EngineRequest
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.testing.models import FakeClock
from tandem.testing.small_engine import SHIFT_FILE, SmallEngine
from tandem.v1 import cluster_pb2
from worker.loaded_adapters import KEPT_S, LoadedAdapters
from worker.registration import adapters_of


def files(folder: Path, shift: int | str) -> AdapterFiles:
    folder.mkdir()
    (folder / SHIFT_FILE).write_text(str(shift))
    return AdapterFiles(folder.name, str(folder))


def load_all(loaded: LoadedAdapters) -> int:
    loads = 0
    while loaded.load_next():
        loads += 1
    return loads


def test_what_is_loaded_is_not_loaded_again(tmp_path: Path) -> None:
    engine = SmallEngine(8)
    loaded = LoadedAdapters(engine, FakeClock())
    one, two = files(tmp_path / "one", 1), files(tmp_path / "two", 2)
    loaded.want((one, one))
    assert (load_all(loaded), engine.adapters) == (1, {"one"})
    loaded.want((one, two))
    assert (load_all(loaded), engine.adapters) == (1, {"one", "two"})
    assert list(loaded.frame().fingerprints) == ["one", "two"]


def test_what_fails_is_tried_again_only_after_it_has_left_the_directory(tmp_path: Path) -> None:
    loaded = LoadedAdapters(SmallEngine(8), FakeClock())
    broken, good = files(tmp_path / "broken", "x"), files(tmp_path / "good", 1)
    loaded.want((broken, good))
    assert load_all(loaded) == 2
    assert list(loaded.failed) == ["broken"]
    loaded.want((broken, good))
    assert load_all(loaded) == 0
    loaded.want((good,))
    assert not loaded.failed
    loaded.want((broken, good))
    assert load_all(loaded) == 1


def test_one_that_left_the_directory_is_kept_for_a_while_and_while_it_is_used(tmp_path: Path) -> None:
    engine, clock = SmallEngine(8), FakeClock()
    loaded = LoadedAdapters(engine, clock)
    one = files(tmp_path / "one", 1)
    loaded.want((one,))
    load_all(loaded)
    loaded.want(())
    clock.advance(KEPT_S - 1)
    loaded.want(())  # another change of the directory begins no new wait
    assert not loaded.drop_old()
    engine.add(EngineRequest("r", (1, 2), SamplingParams(max_tokens=1), HashKey("m", "one")))
    clock.advance(2)
    assert not loaded.drop_old()
    while engine.has_work:
        engine.step()
    assert (loaded.drop_old(), engine.adapters) == (True, frozenset())
    assert not loaded.drop_old()


def test_one_that_comes_back_stays(tmp_path: Path) -> None:
    engine, clock = SmallEngine(8), FakeClock()
    loaded = LoadedAdapters(engine, clock)
    one = files(tmp_path / "one", 1)
    loaded.want((one,))
    load_all(loaded)
    loaded.want(())
    loaded.want((one,))
    clock.advance(2 * KEPT_S)
    assert (loaded.drop_old(), engine.adapters) == (False, {"one"})


def test_a_worker_loads_those_of_its_model_served_or_not() -> None:
    adapters = [
        cluster_pb2.ModelAdapter(model=model, name=name, fingerprint=f"{name}'s", folder=f"/{name}", served=served)
        for model, name, served in (("a", "one", True), ("a", "two", False), ("b", "three", True))
    ]
    directory = cluster_pb2.Directory(adapters=adapters)
    assert adapters_of(directory, "a") == (AdapterFiles("one's", "/one"), AdapterFiles("two's", "/two"))
