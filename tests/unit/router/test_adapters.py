"""Adapters: served as models of their own names, by workers that have loaded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest

from router.requests.raw_request import RawRequest, RawSampling
from router.testing.stub_worker import until
from tandem.errors import ErrorCode
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.v1 import cluster_pb2, inference_pb2, worker_pb2
from tests.unit.router.conftest import MODEL, Cluster
from tests.unit.router.core_cluster import CoreCluster, CoreWorker

SQL, CHAT = "a" * 32, "b" * 32  # fingerprints
PROMPT = [70] * 40


def listed(*, served: bool = True, **names: str) -> list[cluster_pb2.ModelAdapter]:
    return [
        cluster_pb2.ModelAdapter(model=MODEL, name=name, fingerprint=fingerprint, served=served)
        for name, fingerprint in names.items()
    ]


# --- the core's choice of workers


def loaded(worker: CoreWorker, *adapters: str) -> None:
    worker.worker.link._deliver(worker_pb2.WorkerFrame(adapters=worker_pb2.Adapters(fingerprints=adapters)))


def test_a_request_goes_to_workers_that_have_its_adapter() -> None:
    cluster = CoreCluster("p0", "p1", "d0", "d1")
    for name in ("p1", "d1"):
        loaded(cluster.worker(name), SQL, CHAT)
    cluster.fleet.set_adapters(listed(sql=SQL, chat=CHAT))
    for _ in range(3):
        cluster.ask(adapter=SQL)
    cluster.run()
    assert len(cluster.worker("d1").frames("reserve")) == len(cluster.worker("p1").frames("prefill")) == 3
    assert not cluster.worker("d0").frames("reserve")
    cluster.check_settled()


def test_a_request_whose_adapter_no_worker_has_holds_up_no_other() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.fleet.set_adapters(listed(sql=SQL))
    asked, behind = cluster.ask(adapter=SQL), cluster.ask()
    cluster.run()
    assert asked.error.code is ErrorCode.UNAVAILABLE
    assert asked.error.message == "model: no worker has loaded its adapter yet; retry later"
    assert behind.tokens == [70, 71, 72, 73]
    cluster.check_settled()


def test_a_request_waits_for_the_worker_with_its_adapter_while_that_one_takes_none() -> None:
    cluster = CoreCluster("p0", "d0", "d1")
    for name in ("p0", "d0"):
        loaded(cluster.worker(name), SQL)  # replaced, and still there
    having = cluster.worker("d0").worker
    having.drain = cluster_pb2.DRAIN_FINISH
    asked = cluster.ask(adapter=SQL)
    cluster.run(1.0)
    assert asked.end is None
    having.drain = cluster_pb2.DRAIN_NONE
    cluster.pump()
    cluster.run()
    assert asked.tokens == [70, 71, 72, 73]
    cluster.check_settled()


def test_a_request_whose_adapter_was_replaced_is_told_so_when_no_worker_has_it_any_more() -> None:
    cluster = CoreCluster("p0", "d0")
    for name in ("p0", "d0"):
        loaded(cluster.worker(name), SQL, CHAT)
    cluster.fleet.set_adapters(listed(sql=CHAT))
    late = cluster.ask(adapter=SQL)  # workers keep it for a while
    cluster.run()
    assert late.tokens == [70, 71, 72, 73]
    for name in ("p0", "d0"):
        loaded(cluster.worker(name), CHAT)
    too_late = cluster.ask(adapter=SQL)
    cluster.run()
    assert too_late.error.code is ErrorCode.UNAVAILABLE
    assert "its adapter was replaced or removed" in too_late.error.message
    cluster.check_settled()


def test_an_answer_whose_adapter_is_gone_with_its_worker_holds_up_no_other() -> None:
    cluster = CoreCluster("p0", "d0", "d1")
    for name in ("p0", "d0"):
        loaded(cluster.worker(name), SQL)
    cluster.fleet.set_adapters(listed(sql=SQL))
    cluster.worker("d0").token_s = 1.0
    asked = cluster.ask(adapter=SQL)
    cluster.run(1.5)
    assert 0 < len(asked.tokens) < 4
    for name in ("p0", "d0"):  # a lost link forgets what its worker had
        loaded(cluster.worker(name))
    cluster.fleet.set_adapters(listed())
    cluster.worker("d0").lose()
    other = cluster.ask()
    cluster.run()
    assert "its adapter was replaced or removed" in asked.error.message
    assert other.tokens == [70, 71, 72, 73]
    cluster.check_settled()


async def test_a_link_reads_frames_within_frames() -> None:
    """A worker joins those that waited (worker/waiting_frames.py)."""
    link = CoreCluster("d0").worker("d0").worker.link
    inner = worker_pb2.WorkerFrame(adapters=worker_pb2.Adapters(fingerprints=[SQL]))

    class Call:
        answers = iter([worker_pb2.WorkerFrame(more=[worker_pb2.WorkerFrame(), inner])])

        async def read(self) -> worker_pb2.WorkerFrame | None:
            return next(self.answers, None)

        async def details(self) -> str:
            return "over"

    with pytest.raises(Exception, match="over"):
        await link._read(cast(Any, Call()))
    assert link.adapters == {SQL}


def test_a_lost_link_forgets_what_its_worker_had() -> None:
    cluster = CoreCluster("p0", "d0")
    link = cluster.worker("d0").worker.link
    loaded(cluster.worker("d0"), SQL)
    assert cluster.fleet.has_adapter(link.key, SQL)
    link._lost("gone")
    assert not cluster.fleet.has_adapter(link.key, SQL)


# --- the APIs


async def serve(cluster: Cluster, adapters: Sequence[cluster_pb2.ModelAdapter], *on_workers: str) -> None:
    """With workers that have `on_workers`."""
    cluster.controller.adapters = [*adapters]
    for worker in (cluster.prefill, cluster.decode):
        worker.adapters = worker_pb2.Adapters(fingerprints=on_workers)
    await cluster.list_workers(cluster.prefill, cluster.decode)


async def test_an_adapter_is_a_model_of_its_own_name(bare: Cluster) -> None:
    await serve(bare, listed(sql=SQL, chat=CHAT), SQL, CHAT)
    said = bare.says("Hello")
    done = await bare.openai.completions.create(model="sql", prompt=PROMPT, max_tokens=len(said))
    assert (done.model, done.choices[0].text) == ("sql", "Hello")
    works = [*bare.prefill.works.values(), *bare.decode.works.values()]
    assert [work.adapter for work in works] == [SQL, SQL]
    await bare.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert sorted({work.adapter for work in bare.decode.works.values()}) == ["", SQL]
    await bare.settled()


async def test_traces_call_a_model_as_clients_do(bare: Cluster) -> None:
    await serve(bare, listed(sql=SQL), SQL)
    bare.says("Hello")
    for name in ("sql", MODEL):
        done = await bare.openai.completions.create(model=name, prompt=PROMPT, max_tokens=1)
        trace = bare.app.observers.traces.store.get(done.id.removeprefix("cmpl-"))
        assert (trace.model, trace.to_wire().model) == (name, name)


async def test_models_list_adapters_with_their_model(bare: Cluster) -> None:
    await serve(bare, listed(sql=SQL))
    models = {each["id"]: each for each in (await bare.http.get("/v1/models")).json()["data"]}
    assert set(models) == {MODEL, "sql"}
    assert (models["sql"]["parent"], models["sql"]["max_model_len"]) == (MODEL, 512)
    assert "parent" not in models[MODEL]
    assert (await bare.http.get("/v1/models/sql")).json() == models["sql"]
    cards = await bare.inference.ListModels(inference_pb2.ListModelsRequest())
    assert {(each.name, each.parent, each.ready) for each in cards.models} == {(MODEL, "", True), ("sql", MODEL, True)}


async def test_one_that_workers_still_load_is_no_model_yet(bare: Cluster) -> None:
    await serve(bare, listed(served=False, sql=SQL), SQL)
    with pytest.raises(openai.NotFoundError, match="expected one of 'tiny', got 'sql'"):
        await bare.openai.completions.create(model="sql", prompt=PROMPT)


async def test_adapters_come_go_and_are_replaced_while_the_router_serves(bare: Cluster) -> None:
    await serve(bare, listed(sql=SQL), SQL, CHAT)
    bare.says("Hello")
    await bare.openai.completions.create(model="sql", prompt=PROMPT, max_tokens=1)
    await serve(bare, listed(sql=CHAT), SQL, CHAT)
    models = bare.app.service.models.by_name
    await until(lambda: bare.app.service.models.by_name is not models)
    await bare.openai.completions.create(model="sql", prompt=PROMPT, max_tokens=1)
    assert [work.adapter for work in bare.prefill.works.values()] == [SQL, CHAT]
    await serve(bare, [], SQL, CHAT)
    await until(lambda: "sql" not in bare.app.service.models.by_name)
    with pytest.raises(openai.NotFoundError):
        await bare.openai.completions.create(model="sql", prompt=PROMPT)
    await bare.settled()


async def test_blocks_of_two_adapters_are_two(bare: Cluster) -> None:
    await serve(bare, listed(sql=SQL))
    service = bare.app.service
    base, sql = [
        await service.models.by_name[name].parse(RawRequest(name, tuple(PROMPT), RawSampling()), service.threads)
        for name in (MODEL, "sql")
    ]
    assert [*base.block_hashes] == hash_blocks(PROMPT, 16, HashKey("f"))
    assert [*sql.block_hashes] == hash_blocks(PROMPT, 16, HashKey("f", SQL))
    assert not {*base.block_hashes} & {*sql.block_hashes}


async def test_models_come_before_their_adapters_and_errors_name_few(bare: Cluster) -> None:
    await serve(bare, [each for number in range(20) for each in listed(served=True, **{f"a{number}": SQL})])
    assert next(iter(bare.app.service.models.by_name)) == MODEL
    with pytest.raises(openai.NotFoundError, match=r"'a8' and 11 more, got 'none'"):
        await bare.openai.completions.create(model="none", prompt=PROMPT)


async def test_without_a_name_the_model_itself_answers(bare: Cluster) -> None:
    await serve(bare, listed(sql=SQL, chat=CHAT))
    assert bare.app.service.models.find("", required=False).name == MODEL
