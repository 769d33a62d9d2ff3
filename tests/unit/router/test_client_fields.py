"""Every field of the official clients' own types: served, taken without effect, or refused by its name."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from router.requests.facts import Arrived
from router.testing.stub_worker import StubWorker
from tandem.testing.models import write_tiny_llama
from tests.unit.router.conftest import Cluster
from tests.unit.router.test_tools import EOS, TEMPLATE

TABLE = tomllib.loads((Path(__file__).parents[2] / "data" / "client-fields.toml").read_text(encoding="utf-8"))
# What differs between two answers to one request.
_IDS = re.compile(rb'"(chatcmpl-|cmpl-|resp_|msg_|rs_)[^"]*"|"created(_at)?":\d+')
_ANSWER = "Hm.</think>Hello there, all of you."


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("thinking"), max_positions=2048, eos_token_id=EOS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def max_model_tokens() -> int:
    return 2048


def fields_of(type_name: str) -> set[str]:
    """Of the client's type, which is a union of one with a stream and one without."""
    module, _, name = type_name.partition(":")
    kinds = get_args(getattr(import_module(module), name))
    assert len(kinds) > 1
    return set().union(*(kind.__required_keys__ | kind.__optional_keys__ for kind in kinds))


@pytest.mark.parametrize("api", TABLE)
def test_the_table_has_every_field_of_the_client(api: str) -> None:
    known, fields = set(TABLE[api]["fields"]), fields_of(TABLE[api]["type"])
    assert "model" in fields
    assert not (new := sorted(fields - known)), (
        f"{TABLE[api]['type']} has new fields: {', '.join(new)}. Serve them, take them if they change nothing, or "
        "refuse them by name; then add them to tests/data/client-fields.toml and run make docs"
    )


class Observer:
    """What the workers and the client get of requests."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sessions: list[bytes | None] = []
        tokens = [*cluster.says(_ANSWER), EOS]
        for worker in self._workers:
            worker.behaviour.answer = lambda prompt: tokens
        facts = cluster.app.dispatcher.core.facts
        facts.subscribe(Arrived, "test", lambda run, *_: self._sessions.append(run.request.session))

    @property
    def _workers(self) -> tuple[StubWorker, StubWorker]:
        return self._cluster.prefill, self._cluster.decode

    async def observed(self, path: str, body: dict[str, Any], headers: dict[str, str], *, with_seed: bool) -> object:
        reply = await self._cluster.http.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        asked = []
        for worker in self._workers:
            for work in worker.works.values():
                if not with_seed:
                    work.sampling.ClearField("seed")
                sampling = work.sampling.SerializeToString(deterministic=True)
                asked.append((list(work.prompt), list(work.prediction), sampling))
            worker.works.clear()
        sessions, self._sessions[:] = list(self._sessions), []
        return asked, sessions, _IDS.sub(b"", reply.content)


@pytest.mark.parametrize(("api", "field"), [(api, field) for api in TABLE for field in TABLE[api]["fields"]])
async def test_a_field_is_served_or_harmless_or_refused_by_name(cluster: Cluster, api: str, field: str) -> None:
    table = TABLE[api]
    row = table["fields"][field]
    assert any(row.get(key) for key in ("served", "harmless", "refused"))
    body, header = table["body"] | row.get("beside", {}), row.get("header")

    def request(value: Any) -> tuple[dict[str, Any], dict[str, str]]:
        return (body, {header: value}) if header else (body | {field: value}, {})

    observer, with_seed = Observer(cluster), field == "seed"
    without = await observer.observed(table["path"], body, {}, with_seed=with_seed)
    for value in row.get("served", ()):
        assert await observer.observed(table["path"], *request(value), with_seed=with_seed) != without, value
    for value in row.get("harmless", ()):
        assert await observer.observed(table["path"], *request(value), with_seed=with_seed) == without, value
    for value in row.get("refused", ()):
        sent, headers = request(value)
        reply = await cluster.http.post(table["path"], json=sent, headers=headers)
        assert reply.status_code in (400, 404), (value, reply.text)
        error = reply.json()["error"]
        assert field in error["message"], "the reason names the field"
        assert error.get("param", field).startswith(field)
