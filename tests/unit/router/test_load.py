"""`tandem bench` against a real router, over each of its APIs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.cli.commands.planning.bench import BenchFlags, bench_against, find_target
from cluster.cli.commands.planning.compare import run_compare
from cluster.cli.commands.planning.inputs import TrafficFlags, load_traffic
from planner.compare import compared, doubts
from planner.simulator.setup import Slo
from tandem.errors import ConfigError, InputError, ModelNotFound, TandemError
from tests.unit.router.conftest import MODEL, Cluster

TRAFFIC = TrafficFlags("synthetic", "poisson:60", "50:8", prefixes="2:32:1", requests=12)


@pytest.mark.parametrize("api", ["tandem", "completions", "chat"])
async def test_every_api_gives_the_same_report(cluster: Cluster, tmp_path: Path, api: str) -> None:
    tokens = cluster.tokenizer.encode("hello", add_special_tokens=False)[:1] * 64
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.answer = lambda prompt: tokens
    output = tmp_path / "measured.json"
    grpc_url = f"grpc://127.0.0.1:{cluster.app.grpc_port}"
    url = grpc_url if api == "tandem" else f"{cluster.base_url}/v1"
    vocab = None if api == "chat" else 300
    flags = BenchFlags(TRAFFIC, Slo(10.0, 1.0), api, url, model=MODEL, vocab=vocab, prompt_seed=1, output=output)
    assert await bench_against(flags, find_target(flags), load_traffic(TRAFFIC)) == 0
    await cluster.settled()
    result = json.loads(output.read_text())
    assert (result["finished"], result["failed"], result["complete"]) == (12, 0, True)
    assert result["attainment"]["joint"] == 1.0
    assert result["output_tokens_per_s"] > 0
    assert result["ttft_s"]["p99"] < result["e2e_s"]["p99"]
    if api == "tandem":
        assert result["handoffs"] == 12
        assert result["queue_s"]["p50"] is not None
        prompts = [tuple(work.prompt) for work in cluster.prefill.works.values() if len(work.prompt) == 82]
        assert len({each[:32] for each in prompts}) <= 2 < len(set(prompts))
    else:
        assert result["handoffs"] is None
    assert list(doubts(result, result)) == []
    assert all(line.percent in (None, 0) and line.points in (None, 0) for line in compared(result, result))


async def test_what_every_request_would_fail_of_is_said_before_the_first(cluster: Cluster) -> None:
    base = {"traffic": TRAFFIC, "slo": Slo(), "api": "completions", "url": f"{cluster.base_url}/v1"}
    flags = BenchFlags(**base, model="another")  # type: ignore[arg-type]
    with pytest.raises(TandemError, match="another"):
        await bench_against(flags, find_target(flags), load_traffic(TRAFFIC))
    url = f"grpc://127.0.0.1:{cluster.app.grpc_port}"
    flags = BenchFlags(TRAFFIC, Slo(), "tandem", url, model="another")
    with pytest.raises(ModelNotFound, match=f"expected one of {MODEL}"):
        await bench_against(flags, find_target(flags), load_traffic(TRAFFIC))


async def test_a_result_is_shown_before_it_is_written(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"grpc://127.0.0.1:{cluster.app.grpc_port}"
    gone = tmp_path / "gone" / "measured.json"
    flags = BenchFlags(TRAFFIC, Slo(), "tandem", url, vocab=300, output=gone, json=True)
    with pytest.raises(ConfigError, match=f"--output: {gone}: No such file or directory"):
        await bench_against(flags, find_target(flags), load_traffic(TRAFFIC))
    await cluster.settled()
    assert json.loads(capsys.readouterr().out)["complete"]


async def test_an_interrupted_warm_up_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        flags = BenchFlags(TRAFFIC, Slo(), "completions", url, model=MODEL)
        bench = asyncio.create_task(bench_against(flags, find_target(flags), load_traffic(TRAFFIC)))
        await asked.wait()
        bench.cancel()
        assert await bench == 1
        await ended.wait()
    assert capsys.readouterr() == ("", "interrupted before the first request\n")


@pytest.mark.parametrize(
    ("api", "url", "model", "said"),
    [
        ("soap", "http://h/v1", "m", "--api: expected one of tandem"),
        ("chat", "grpc://h:1", "m", "--url: expected http://HOST:PORT/v1"),
        ("tandem", "127.0.0.1:50051", "", "--url: expected grpc://HOST:PORT"),
        ("chat", "http://h/v1", "", "--model"),
    ],
)
def test_wrong_options_say_what_was_expected(api: str, url: str, model: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_target(BenchFlags(TRAFFIC, Slo(), api, url, model=model))


@pytest.mark.parametrize("url", ["http://me:secret@h:1/v1", "http://[::1]:1/v1", "http://h/v1?a=b"])
def test_a_password_in_the_url_is_not_shown(url: str) -> None:
    assert find_target(BenchFlags(TRAFFIC, Slo(), "chat", url, model="m")).shown == url.replace("me:secret@", "")
    with pytest.raises(ConfigError, match="--url") as refused:
        find_target(BenchFlags(TRAFFIC, Slo(), "tandem", url))
    assert "secret" not in refused.value.message


def test_what_is_no_result_cannot_be_compared(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("[]", "{", '{"ttft_s": 1}'):
        wrong.write_text(text)
        with pytest.raises(InputError, match="tandem bench --json"):
            run_compare(wrong, wrong, as_json=True, report=None)
