"""Requests with an idempotency key over HTTP: the workers see each once, and every client gets the whole answer."""

from __future__ import annotations

import asyncio
import json
import sys
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvtransfer.causes import HandoffCause, HandoffFault
from router.edge.keyed_http import answer_once
from router.edge.limits.http import SCOPE_KEY
from router.idempotency import answer_log, keyed_answers
from router.idempotency.tenant_shares import TenantShares
from router.testing.stub_worker import until
from tandem.config.auth import AuthSpec, LimitsSpec
from tandem.config.router import Disaggregation, IdempotencySpec, RouterSpec
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import Cluster

MODEL = "tiny"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
STREAM = BODY | {"stream": True}
KEYED = {"idempotency-key": "order 66"}
REPLAYED = "idempotency-replayed"


@pytest.fixture
def grace_s() -> float:
    return 600.0


@pytest.fixture
def spec(grace_s: float) -> RouterSpec:
    return RouterSpec(
        http_port=0,
        grpc_port=0,
        disaggregation=Disaggregation.ALWAYS,
        queue_timeout_s=1.0,
        max_migrations=0,
        idempotency=IdempotencySpec(grace_s=grace_s, keep_s=600.0),
    )


def post(cluster: Cluster, body: Any = BODY, **headers: str) -> asyncio.Task[httpx.Response]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=KEYED | given))


def prefills(cluster: Cluster) -> int:
    return len(cluster.prefill.frames("prefill"))


async def begun(cluster: Cluster, count: int = 1) -> None:
    await until(lambda: prefills(cluster) == count)


async def leave(client: asyncio.Task[httpx.Response]) -> None:
    """The client closes its connection."""
    client.cancel()
    await asyncio.wait([client])


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_a_repeat_of_a_done_request_gets_the_same_bytes(
    cluster: Cluster, path: str, body: dict[str, Any]
) -> None:
    text = {"completions": "prompt", "responses": "input"}
    said = {text[path]: "Hi"} if path in text else {"messages": [{"role": "user", "content": "Hi"}]}
    asked = {"model": MODEL, "stream": "stream" in body, **said}
    cluster.says("Once only.")
    answers = [await cluster.http.post(f"/v1/{path}", json=asked, headers=KEYED) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert "Once only." in answers[0].text or "[DONE]" in answers[0].text or "response.completed" in answers[0].text
    assert len({answer.headers["content-type"] for answer in answers}) == 1
    assert [answer.headers.get(REPLAYED) for answer in answers] == [None, "true", "true"]
    assert prefills(cluster) == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_repeats_of_a_request_under_way_follow_it_to_its_end(cluster: Cluster, body: dict[str, Any]) -> None:
    cluster.says("One, two, three, four, five.")
    cluster.decode.behaviour.token_delay_s = 0.02
    first = post(cluster, body)
    await begun(cluster)
    others = [post(cluster, body) for _ in range(3)]
    answers = [await each for each in (first, *others)]
    assert len({answer.content for answer in answers}) == 1
    assert [answer.headers.get(REPLAYED) for answer in answers] == [None, "true", "true", "true"]
    assert prefills(cluster) == 1
    await cluster.settled()


async def test_a_repeat_sees_what_was_written_before_the_end(cluster: Cluster) -> None:
    cluster.says("One, two, three.")
    cluster.decode.behaviour.token_delay_s = 0.2
    first = post(cluster, STREAM)
    await begun(cluster)
    async with cluster.http.stream("POST", "/v1/completions", json=STREAM, headers=KEYED) as repeat:
        early = await anext(repeat.aiter_lines())
        assert early.startswith("data: ")
        assert not first.done()
    await first


async def test_without_the_header_or_with_another_key_or_tenant_each_request_runs(cluster: Cluster) -> None:
    for headers in ({}, {}, KEYED, {"idempotency-key": "other"}, KEYED | {"x-tandem-tenant": "other"}):
        answer = await cluster.http.post("/v1/completions", json=BODY, headers=headers)
        assert (answer.status_code, REPLAYED in answer.headers) == (200, False)
    assert prefills(cluster) == 5


async def test_a_repeat_keeps_its_own_request_id(cluster: Cluster) -> None:
    first = await post(cluster, x_request_id="a")
    repeat = await post(cluster, x_request_id="b")
    assert (first.headers["x-request-id"], repeat.headers["x-request-id"]) == ("a", "b")
    assert first.content == repeat.content


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_request_goes_on_without_its_client_and_a_retry_finds_it(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    cluster.says("One, two, three, four, five.")
    cluster.decode.behaviour.token_delay_s = 0.02
    first = post(cluster, body)
    await begun(cluster)
    await leave(first)
    answer = await post(cluster, body)
    assert (answer.status_code, answer.headers[REPLAYED]) == (200, "true")
    assert prefills(cluster) == 1
    assert not cluster.decode.cancelled
    await cluster.settled()


@pytest.mark.parametrize("grace_s", [0.3])
async def test_a_request_that_no_client_waits_for_is_cancelled_after_the_grace_and_its_key_is_free(
    cluster: Cluster,
) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    first = post(cluster)
    await begun(cluster)
    await leave(first)
    await until(lambda: cluster.app.dispatcher.active == 0)
    assert cluster.ends("cancelled") == 1
    cluster.prefill.behaviour.hold_prefills = False
    answer = await post(cluster)
    assert (answer.status_code, answer.headers.get(REPLAYED)) == (200, None)


async def test_a_retry_within_the_grace_stops_its_count(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    first = post(cluster)
    await begun(cluster)
    await leave(first)
    [entry] = keyed(cluster)._entries.values()
    await until(lambda: entry.timer is not None)
    retry = post(cluster)
    await until(lambda: attached(cluster) == 1)
    assert entry.timer is not None
    assert entry.timer.cancelled()
    assert cluster.app.dispatcher.active == 1
    await leave(retry)
    await until(lambda: entry.timer is not None and not entry.timer.cancelled())
    assert entry.task is not None
    entry.task.cancel()
    await until(lambda: cluster.app.dispatcher.active == 0)


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_key_with_another_body_or_path_is_refused(cluster: Cluster, is_done: bool) -> None:
    if not is_done:
        cluster.decode.behaviour.token_delay_s = 2.0
    first = post(cluster)
    await begun(cluster)
    if is_done:
        await first
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (("completions", BODY | {"prompt": "Ho"}), ("completions", STREAM), ("chat/completions", chat)):
        answer = await cluster.http.post(f"/v1/{path}", json=body, headers=KEYED)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (422, "idempotency_key_reused", "idempotency-key")
    assert first.done() == is_done
    assert (await first).status_code == 200
    assert prefills(cluster) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "é"])
async def test_an_invalid_key_is_refused_by_name(cluster: Cluster, key: str) -> None:
    headers = {b"idempotency-key": key.encode("latin-1")}
    answer = await cluster.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "idempotency-key"
    assert prefills(cluster) == 0
    longest = await cluster.http.post("/v1/completions", json=BODY, headers={"idempotency-key": "~" * 255})
    assert longest.status_code == 200


async def test_a_refusal_that_a_retry_cannot_help_is_repeated(cluster: Cluster) -> None:
    bad = BODY | {"temperature": -1}
    answers = [await post(cluster, bad) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].content == answers[1].content
    assert [answer.headers.get(REPLAYED) for answer in answers] == [None, "true"]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_failure_that_a_retry_may_help_frees_the_key(bare: Cluster, body: dict[str, Any]) -> None:
    refused = await post(bare, body)
    assert refused.status_code == 503
    await bare.list_workers(bare.prefill, bare.decode)
    answer = await post(bare, body)
    assert (answer.status_code, answer.headers.get(REPLAYED)) == (200, None)


async def test_a_stream_that_breaks_off_tells_all_its_clients_and_frees_the_key(cluster: Cluster) -> None:
    cluster.says("One, two, three, four, five.")
    cluster.decode.behaviour.token_delay_s = 0.2
    first = post(cluster, STREAM)
    await begun(cluster)
    repeat = post(cluster, STREAM)
    await until(lambda: attached(cluster) == 1)
    cluster.decode.behaviour.fail_decodes = 1
    answers = [await first, await repeat]
    assert answers[0].content == answers[1].content
    assert [answer.status_code for answer in answers] == [200, 200]
    assert '"code":"worker_lost"' in answers[0].text
    cluster.decode.behaviour.token_delay_s = 0.0
    whole = await post(cluster, STREAM)
    assert (whole.headers.get(REPLAYED), "worker_lost" in whole.text) == (None, False)


async def test_the_router_ends_keyed_requests_when_it_stops(cluster: Cluster) -> None:
    cluster.prefill.behaviour.hold_prefills = True
    first = post(cluster)
    await begun(cluster)
    closing = asyncio.create_task(cluster.app.close())
    answer = await first
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    await closing


class TestMemory:
    async def test_a_long_answer_reaches_its_clients_and_a_repeat_is_told_that_it_is_not_kept(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster.says("a long answer " * 20)
        expected = (await cluster.http.post("/v1/completions", json=STREAM)).text
        monkeypatch.setattr(answer_log, "MAX_KEPT_BYTES", 1000)
        first = await post(cluster, STREAM)
        assert texts(first.text) == texts(expected)
        repeat = await post(cluster, STREAM)
        assert (repeat.status_code, repeat.json()["error"]["code"]) == (409, "answer_not_kept")
        assert "retry-after" not in repeat.headers
        assert keyed(cluster).kept_bytes == 0

    async def test_done_answers_make_room_for_others_the_least_recently_used_first(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def status(key: str) -> int:
            return (await post(cluster, idempotency_key=key)).status_code

        assert await status("a") == 200
        size_bytes = keyed(cluster).kept_bytes
        monkeypatch.setattr(keyed_answers, "MAX_TOTAL_BYTES", 3 * size_bytes + size_bytes // 2)
        assert [await status(key) for key in ("b", "c", "a", "d")] == [200] * 4
        assert keyed(cluster).kept_bytes <= 3 * size_bytes + size_bytes // 2
        assert [await status(key) for key in ("a", "b", "c", "d")] == [200, 409, 200, 200]
        assert prefills(cluster) == 4

    async def test_the_oldest_key_is_forgotten_when_there_are_too_many(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keyed_answers, "MAX_KEYS", 2)
        for key in ("a", "b", "c"):
            await post(cluster, idempotency_key=key)
        assert (await post(cluster, idempotency_key="b")).headers[REPLAYED] == "true"
        assert REPLAYED not in (await post(cluster, idempotency_key="a")).headers

    async def test_the_tenant_that_holds_most_makes_room(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def ask(tenant: str, key: str) -> httpx.Response:
            return await post(cluster, idempotency_key=key, x_tandem_tenant=tenant)

        await ask("quiet", "a")
        size_bytes = keyed(cluster).kept_bytes
        monkeypatch.setattr(keyed_answers, "MAX_TOTAL_BYTES", 3 * size_bytes + size_bytes // 2)
        for key in ("a", "b", "c", "d"):
            await ask("loud", key)
        assert [(await ask("loud", key)).status_code for key in ("a", "b", "c", "d")] == [409, 409, 200, 200]
        assert (await ask("quiet", "a")).headers[REPLAYED] == "true"
        monkeypatch.setattr(keyed_answers, "MAX_KEYS", 5)
        await ask("loud", "e")
        assert [REPLAYED in (await ask(*given)).headers for given in (("quiet", "a"), ("loud", "a"))] == [True, False]

    def test_a_tenant_displaces_none_that_holds_less(self) -> None:
        shares: TenantShares[str] = TenantShares()
        shares.take("loud", 3)
        shares.take("quiet", 2)
        shares.offer("quiet", b"k", "an answer")
        assert shares.give_up("loud") is None
        shares.give_back("loud", 2)
        assert shares.give_up("loud") == "an answer"
        assert (shares.give_up("loud"), shares.total) == (None, 3)

    @pytest.mark.parametrize("grace_s", [0.3])
    async def test_keys_of_running_requests_are_not_forgotten(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keyed_answers, "MAX_KEYS", 1)
        cluster.prefill.behaviour.hold_prefills = True
        first = post(cluster, idempotency_key="a")
        await begun(cluster)
        assert (await post(cluster, idempotency_key="b")).status_code == 429
        await leave(first)


class TestKeep:
    @pytest.fixture
    def spec(self) -> RouterSpec:
        return RouterSpec(http_port=0, grpc_port=0, idempotency=IdempotencySpec(keep_s=0.2))

    async def test_a_done_answer_is_forgotten_after_its_time(self, cluster: Cluster) -> None:
        await post(cluster)
        await until(lambda: keyed(cluster).kept_bytes == 0)
        assert REPLAYED not in (await post(cluster)).headers


class TestCallers:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> Keys:
        keys = Keys(tmp_path / "keys.yaml")
        keys.add("acme")
        keys.add("other")
        return keys

    @pytest.fixture
    def auth(self, keys: Keys, tmp_path: Path) -> AuthSpec:
        return AuthSpec(keys_file=str(keys.path), audit_log=str(tmp_path / "audit.log"))

    async def test_a_key_of_another_tenant_is_another_key(self, cluster: Cluster, keys: Keys) -> None:
        for tenant, replayed in (("acme", None), ("other", None), ("acme", "true")):
            answer = await post(cluster, **keys.bearer(tenant))
            assert (answer.status_code, answer.headers.get(REPLAYED)) == (200, replayed)

    @pytest.mark.parametrize("body", [BODY, BODY | {"prompt": "Ho"}], ids=["replayed", "refused"])
    async def test_a_request_counts_once_and_each_repeat_once(
        self, cluster: Cluster, keys: Keys, body: dict[str, Any]
    ) -> None:
        keys.add("few", limits=LimitsSpec(requests_per_minute=3))
        await until_known(cluster, keys, "few")
        assert (await post(cluster, **keys.bearer("few"))).status_code == 200
        repeats = [await post(cluster, body, **keys.bearer("few")) for _ in range(3)]
        assert [answer.status_code for answer in repeats] == [*[200 if body is BODY else 422] * 2, 429]
        assert repeats[-1].json()["error"]["code"] == "rate_limit_exceeded"
        assert REPLAYED not in repeats[-1].headers

    async def test_a_refused_priority_frees_the_key(self, cluster: Cluster, keys: Keys) -> None:
        """A repeat with another priority is the same request."""
        keys.add("nightly", priorities=("batch",))
        headers = keys.bearer("nightly")
        async with asyncio.timeout(60):
            while (refused := await post(cluster, x_tandem_priority="interactive", **headers)).status_code == 401:
                await asyncio.sleep(0.01)
        assert refused.status_code == 403
        repeat = await post(cluster, x_tandem_priority="batch", **headers)
        assert (repeat.status_code, repeat.headers.get(REPLAYED)) == (200, None)

    async def test_the_audit_log_tells_the_end_of_a_request_whose_client_left(
        self, cluster: Cluster, keys: Keys, tmp_path: Path
    ) -> None:
        cluster.says("One, two, three.")
        cluster.decode.behaviour.token_delay_s = 0.005
        first = post(cluster, **keys.bearer("acme"))
        await begun(cluster)
        await leave(first)
        audit = tmp_path / "audit.log"
        await until(lambda: audit.read_text().count("\n") == 1)
        repeat = await post(cluster, **keys.bearer("acme"))
        await until(lambda: audit.read_text().count("\n") == 2)
        ran, repeated = (json.loads(line) for line in audit.read_text().splitlines())
        assert (ran["outcome"], ran["completion_tokens"]) == ("finished", repeat.json()["usage"]["completion_tokens"])
        assert (repeated["outcome"], repeated["completion_tokens"]) == ("ok", 0)


async def until_known(cluster: Cluster, keys: Keys, tenant: str) -> None:
    async with asyncio.timeout(60):
        while (await cluster.http.get("/v1/models", headers=keys.bearer(tenant))).status_code == 401:
            await asyncio.sleep(0.01)


def attached(cluster: Cluster) -> float:
    return cluster.metric('tandem_keyed_requests_total{api="http",outcome="attached"}')


def keyed(cluster: Cluster) -> keyed_answers.KeyedAnswers:
    return cluster.app._keyed


def texts(events: str) -> str:
    return "".join(part.split('"', 1)[0] for part in events.split('"text":"')[1:])


async def test_a_kept_failure_keeps_nothing_of_its_request(cluster: Cluster) -> None:
    """Thousands of them are kept for minutes, and each body may have megabytes."""
    bad = BODY | {"prompt": "x" * 100_000, "temperature": -1}
    assert (await post(cluster, bad)).status_code == 400
    [entry] = cluster.app._keyed._entries.values()
    error = entry.log.error
    assert error is not None
    assert (error.__context__, error.__cause__, error.__traceback__) == (None, None, None)
    assert entry.on_end.__closure__ is None


async def test_a_repeat_holds_no_body_while_it_waits(cluster: Cluster) -> None:
    release = asyncio.Event()

    async def handler(request: Request) -> Response:
        await release.wait()
        return Response(b"done")

    def ask(body: bytes) -> asyncio.Task[Response]:
        bodies = [body]

        async def receive(request: Request) -> bytes:
            return bodies.pop()

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"k")]}
        scope[SCOPE_KEY] = SimpleNamespace(when_lost=lambda call: None)
        return asyncio.create_task(answer_once(Request(scope), receive, handler, keyed(cluster), cluster.app.service))

    first, body = ask(bytes(100_000)), bytes(100_000)
    await until(lambda: bool(keyed(cluster)._entries))
    references = sys.getrefcount(body)
    repeat = ask(body)
    await until(lambda: attached(cluster) == 1)
    assert sys.getrefcount(body) == references
    release.set()
    await asyncio.gather(first, repeat)


def test_every_error_of_a_request_can_be_told_to_several_clients() -> None:
    fault = copy(HandoffFault(HandoffCause.DEADLINE, "late"))
    assert (fault.cause, fault.message, str(fault)) == (HandoffCause.DEADLINE, "late", "late")
