"""Images of chats on their way to a worker that says which tokens they become."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.requests import image_expansion
from router.requests.image_expansion import EACH, SHARE_OF_ONE
from router.testing.stub_worker import until
from tandem.config.auth import AuthSpec, LimitsSpec
from tandem.errors import InputError, OverloadedError, RequestFailed, UnavailableError
from tandem.images import ExpandedPrompt
from tandem.testing.models import write_tiny_llama
from tandem.testing.small_engine import SmallEngine
from tandem.v1 import worker_pb2
from tests.unit.router.auth.conftest import Keys
from tests.unit.router.conftest import EOS, MODEL, Cluster

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|endoftext|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
IMAGE = b"GIF89a, 13 B."
URL = f"data:image/gif;base64,{base64.b64encode(IMAGE).decode()}"
MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), max_positions=2048, eos_token_id=EOS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.yaml")
    keys.add("acme")
    keys.add("rival")
    keys.add("short", limits=LimitsSpec(tokens_per_minute=400))
    return keys


@pytest.fixture
def auth(keys: Keys) -> AuthSpec:
    return AuthSpec(keys_file=str(keys.path))


def expand(asked: worker_pb2.ExpandImages) -> ExpandedPrompt:
    return SmallEngine(1).expand(tuple(asked.prompt), tuple(asked.images), asked.cache_salt)


@pytest.fixture
async def cluster(bare: Cluster) -> Cluster:
    for worker in (bare.prefill, bare.decode):
        worker.expands = expand
    await bare.list_workers(bare.prefill, bare.decode)
    return bare


async def chat(cluster: Cluster, keys: Keys, tenant: str = "acme", **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4} | more
    return await cluster.http.post("/v1/chat/completions", json=body, headers=keys.bearer(tenant))


async def test_each_tenants_images_are_read_under_a_salt_of_its_own(cluster: Cluster, keys: Keys) -> None:
    """The same as of its blocks: what is kept of an image is found by those requests that find its KV."""
    more: list[dict[str, str]] = [{}, {}, {}, {"cache_salt": "apart"}]
    for tenant, salted in zip(("acme", "rival", "acme", "acme"), more, strict=True):
        assert (await chat(cluster, keys, tenant, **salted)).status_code == 200
    tokens = await cluster.http.post("/tokenize", json={"messages": MESSAGES}, headers=keys.bearer("rival"))
    assert tokens.status_code == 200, tokens.text
    acme, rival, again, apart, tokenized = (each.cache_salt for each in cluster.prefill.expansions)
    assert (again, tokenized) == (acme, rival)
    assert len({b"", acme, rival, apart}) == 4
    assert {each.cache_salt for each in cluster.prefill.works.values()} == {acme, rival, apart}


async def test_a_request_whose_images_a_worker_failed_to_read_is_counted(cluster: Cluster, keys: Keys) -> None:
    cluster.prefill.expands = lambda asked: RequestFailed("the request cannot be computed")
    assert (await chat(cluster, keys)).status_code == 500
    assert cluster.metric('tandem_requests_total{code="request_failed",model="tiny",state="rejected"}') == 1


@pytest.mark.parametrize(
    ("expanded", "said"),
    [
        (ExpandedPrompt((5, 10**6), ((0, 1),)), "expected token ids from 0 to"),
        (ExpandedPrompt((5, 0), ((1, 2),)), "expected placeholders that follow each other within 2 tokens"),
        (ExpandedPrompt((5, 0), ()), "expected 1 images, got 0"),
    ],
)
async def test_an_expansion_that_cannot_be_is_never_sent_to_another_worker(
    cluster: Cluster, keys: Keys, expanded: ExpandedPrompt, said: str
) -> None:
    cluster.prefill.expands = lambda asked: expanded
    reply = await chat(cluster, keys)
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (500, True), reply.text
    assert cluster.decode.works == {}


async def test_a_worker_with_too_many_images_to_read_leaves_them_to_another(cluster: Cluster, keys: Keys) -> None:
    cluster.prefill.expands = lambda asked: UnavailableError("images: those of others took over 20 s to read")
    assert (await chat(cluster, keys)).status_code == 200
    assert [len(each.expansions) for each in (cluster.prefill, cluster.decode)] == [1, 1]
    cluster.decode.expands = cluster.prefill.expands
    reply = await chat(cluster, keys)
    assert reply.status_code == 503
    assert "no worker has read the images: images: those of others" in reply.json()["error"]["message"]


async def test_images_of_one_tenant_leave_room_to_others(cluster: Cluster, keys: Keys) -> None:
    """Also those of requests on their way through the workers."""
    cluster.prefill.behaviour.hold_prefills = True
    expander = cluster.app.service._images
    expander._room_bytes = SHARE_OF_ONE * len(IMAGE)
    held = asyncio.create_task(chat(cluster, keys))
    await until(lambda: len(cluster.prefill.frames("prefill")) == 1)
    refused = await chat(cluster, keys)
    assert refused.status_code == 429
    assert "messages: the images of the requests of one tenant here take" in refused.json()["error"]["message"]
    with expander.held("rival", [IMAGE]), pytest.raises(OverloadedError, match="the images of the requests here take"):
        expander.held("third", [IMAGE]).__enter__()
    assert not expander._parsed_bytes
    held.cancel()
    await cluster.settled()


async def test_images_of_one_tenant_that_wait_leave_places_to_others(
    cluster: Cluster, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_expansion, "MAX_WAITING", SHARE_OF_ONE)
    slots = cluster.app.service._images._slots_of(MODEL)
    for _ in range(EACH):
        await slots.take("busy", 1)
    waiting = [asyncio.create_task(chat(cluster, keys))]
    await until(lambda: slots.waiting == 1)
    refused = await chat(cluster, keys)
    assert refused.status_code == 429
    assert "the images of 1 requests of one tenant wait to be read" in refused.json()["error"]["message"]
    waiting.append(asyncio.create_task(chat(cluster, keys, "rival")))
    await until(lambda: slots.waiting == SHARE_OF_ONE)
    for _ in range(EACH):
        slots.release()
    assert [(await each).status_code for each in waiting] == [200, 200]


async def test_no_worker_reads_images_beyond_the_limit_of_a_key(cluster: Cluster, keys: Keys) -> None:
    """Of any call; and images that a worker read in vain count too."""

    def unreadable(asked: worker_pb2.ExpandImages) -> InputError:
        return InputError("images: expected images", field="images")

    cluster.prefill.expands = unreadable
    tokenized = {"model": MODEL, "messages": MESSAGES}
    source = {"type": "base64", "media_type": "image/gif", "data": base64.b64encode(IMAGE).decode()}
    counted = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    statuses = [
        (await cluster.http.post(path, json=body, headers=keys.bearer("short"))).status_code
        for path, body in (
            ("/tokenize", tokenized),
            ("/tokenize", tokenized),
            ("/v1/messages/count_tokens", counted),
            ("/v1/chat/completions", tokenized),
        )
    ]
    assert statuses == [400, 429, 429, 429]
    assert len(cluster.prefill.expansions) == 1


async def test_images_that_no_worker_could_read_cost_nothing(cluster: Cluster, keys: Keys) -> None:
    for worker in (cluster.prefill, cluster.decode):
        worker.expands = lambda asked: UnavailableError("images: those of others took over 20 s to read")
    assert (await chat(cluster, keys, "short")).status_code == 503
    for worker in (cluster.prefill, cluster.decode):
        worker.expands = expand
    assert (await chat(cluster, keys, "short")).status_code == 200
