"""A worker's adapters follow the directory: copied in a thread, loaded, and kept for a while after they left it."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.engine.api import AdapterFiles, EngineRequest
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.testing.models import FakeClock
from tandem.testing.small_engine import SmallEngine, write_shift
from tandem.v1 import cluster_pb2
from worker.inbox import AdapterCopied
from worker.loaded_adapters import KEPT_S, RETRY_S, LoadedAdapters
from worker.registration import adapters_of

TIMEOUT_S = 30.0


class Site:
    def __init__(self, folder: Path, copying: ThreadPoolExecutor) -> None:
        self.engine, self.clock = SmallEngine(8), FakeClock()
        self.results: queue.SimpleQueue[AdapterCopied] = queue.SimpleQueue()
        self.loaded = LoadedAdapters(self.engine, self.clock, copying, self.results.put)
        self.one, self.two = write_shift(folder / "one", 1), write_shift(folder / "two", 2)
        self.broken = write_shift(folder / "broken", None)

    def take(self, results: int) -> int:
        """Takes so many copies. Returns how many adapters that made."""
        made = sum(self.loaded.copied(self.results.get(timeout=TIMEOUT_S)) for _ in range(results))
        assert self.results.empty()
        return made


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(1) as copying:
        yield Site(tmp_path, copying)


def names(*adapters: AdapterFiles) -> frozenset[str]:
    return frozenset(each.fingerprint for each in adapters)


def test_what_is_loaded_or_being_copied_is_not_copied_again(site: Site) -> None:
    site.loaded.want((site.one, site.one))
    site.loaded.want((site.one, site.two))
    assert (site.take(2), site.engine.adapters) == (2, names(site.one, site.two))
    site.loaded.want((site.two, site.one))
    assert site.take(0) == 0
    assert {*site.loaded.frame().fingerprints} == names(site.one, site.two)


def test_a_copy_that_is_wanted_no_more_is_not_loaded(site: Site) -> None:
    site.loaded.want((site.one,))
    site.loaded.want(())
    assert (site.take(1), site.engine.adapters) == (0, frozenset())


def test_what_was_copied_once_needs_its_source_no_more(site: Site) -> None:
    site.loaded.want((site.one,))
    site.take(1)
    shutil.rmtree(site.one.folder)
    site.engine.drop_adapter(site.one.fingerprint)
    site.loaded.want((site.one,))
    assert site.take(1) == 1


def test_what_fails_is_tried_again_after_a_while(site: Site) -> None:
    shutil.rmtree(site.two.folder)
    site.loaded.want((site.broken, site.two, site.one))
    assert site.take(3) == 1
    assert {*site.loaded.failed} == names(site.broken, site.two)
    assert "expected a number as its shift" in site.loaded.failed[site.broken.fingerprint]
    site.loaded.want((site.broken, site.two, site.one))
    site.loaded.tick()
    assert site.take(0) == 0
    write_shift(Path(site.two.folder), 2)
    site.clock.advance(RETRY_S)
    site.loaded.tick()
    site.loaded.tick()
    assert site.take(2) == 1
    assert {*site.loaded.failed} == names(site.broken)
    site.loaded.want((site.one,))
    assert not site.loaded.failed


def test_one_that_left_the_directory_is_kept_for_a_while_and_while_it_is_used(site: Site) -> None:
    site.loaded.want((site.one,))
    site.take(1)
    site.loaded.want(())
    site.clock.advance(KEPT_S - 1)
    site.loaded.want(())  # another change of the directory begins no new wait
    assert not site.loaded.tick()
    engine = site.engine
    engine.add(EngineRequest("r", (1, 2), SamplingParams(max_tokens=1), HashKey("m", site.one.fingerprint)))
    site.clock.advance(2)
    assert not site.loaded.tick()
    while engine.has_work:
        engine.step()
    assert (site.loaded.tick(), engine.adapters) == (True, frozenset())
    assert not site.loaded.tick()


def test_one_that_comes_back_stays(site: Site) -> None:
    site.loaded.want((site.one,))
    site.take(1)
    site.loaded.want(())
    site.loaded.want((site.one,))
    site.clock.advance(2 * KEPT_S)
    assert (site.loaded.tick(), site.engine.adapters) == (False, names(site.one))


def test_a_worker_loads_those_of_its_model_served_or_not() -> None:
    adapters = [
        cluster_pb2.ModelAdapter(model=model, name=name, fingerprint=f"{name}'s", folder=f"/{name}", served=served)
        for model, name, served in (("a", "one", True), ("a", "two", False), ("b", "three", True))
    ]
    directory = cluster_pb2.Directory(adapters=adapters)
    assert adapters_of(directory, "a") == (AdapterFiles("one's", "/one"), AdapterFiles("two's", "/two"))
