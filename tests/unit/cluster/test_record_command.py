"""`tandem trace record`: what becomes of its file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from cluster.cli.admin_client import Admin, NoController
from cluster.cli.commands.record import run_record
from tandem.v1 import cluster_pb2_grpc, trace_pb2

NOWHERE = Admin("127.0.0.1:1")
FINISHED = trace_pb2.LoggedRequest(received_unix_s=1.0, prompt_tokens=5, output_tokens=3)
REFUSED = trace_pb2.LoggedRequest(received_unix_s=1.0, prompt_tokens=5)


class Controller(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, logged: list[trace_pb2.LoggedRequest]) -> None:
        self._logged = logged

    def RecordRequests(
        self, request: trace_pb2.RecordRequestsRequest, context: grpc.ServicerContext
    ) -> Iterator[trace_pb2.LoggedRequest]:
        yield from self._logged


@contextmanager
def controller(*logged: trace_pb2.LoggedRequest) -> Iterator[Admin]:
    server = grpc.server(ThreadPoolExecutor(1))
    cluster_pb2_grpc.add_ClusterServicer_to_server(Controller([*logged]), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Admin(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


def record(target: Admin, output: Path, *, overwrite: bool) -> int:
    return run_record(target, output, model="", duration_s=None, requests=9, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_recording_of_nothing_leaves_no_file(tmp_path: Path, overwrite: bool) -> None:
    output = tmp_path / "users.jsonl"
    with pytest.raises(NoController):
        record(NOWHERE, output, overwrite=overwrite)
    with controller(REFUSED) as target:
        assert record(target, output, overwrite=overwrite) == 1
    assert not output.exists()


def test_an_earlier_recording_stays_until_the_first_request(tmp_path: Path) -> None:
    output = tmp_path / "users.jsonl"
    output.write_text("earlier\n" * 99)
    with pytest.raises(NoController):
        record(NOWHERE, output, overwrite=True)
    with controller(REFUSED) as target:
        assert record(target, output, overwrite=True) == 1
    assert output.read_text() == "earlier\n" * 99
    with controller(FINISHED, FINISHED) as target:
        assert record(target, output, overwrite=True) == 0
    lines = output.read_text().splitlines()
    assert len(lines) == 2
    assert all('"prompt_tokens": 5' in line for line in lines)


def test_a_device_can_be_written(tmp_path: Path) -> None:
    with controller(FINISHED) as target:
        assert record(target, Path("/dev/null"), overwrite=True) == 0
