"""Certificates are renewed where they lie, while their users run."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.certificates import create, folder_spec
from kvtransfer.connection.tls import TlsConnection
from kvtransfer.control import TlsFiles
from kvtransfer.testing.worker import FakeWorker
from tandem.rpc.identity import Identity
from tandem.rpc.tls import RenewedTls, load_tls
from tests.conftest import Authority

MakeWorker = Callable[..., FakeWorker]


def put(files: dict[str, str], folder: Path) -> TlsFiles:
    """At the same paths, whatever was there before."""
    folder.mkdir(exist_ok=True)
    for name, path in files.items():
        shutil.copy(path, folder / name)
    return TlsFiles(str(folder / "cert"), str(folder / "key"), str(folder / "ca"))


def test_renewed_files_are_taken_and_unchanged_ones_not_read_again(
    authority: Callable[[str], Authority], tmp_path: Path
) -> None:
    ours = authority("ours")
    renewed = RenewedTls(put(ours.issue("first"), tmp_path / "tls"))
    first = renewed.current()
    assert renewed.current() is first
    put(ours.issue("second"), tmp_path / "tls")
    second = renewed.current()
    assert second is not first
    assert renewed.current() is second


def test_files_that_do_not_fit_each_other_leave_what_there_was(
    authority: Callable[[str], Authority], tmp_path: Path
) -> None:
    ours = authority("ours")
    first, second = ours.issue("first"), ours.issue("second")
    renewed = RenewedTls(put(first, tmp_path / "tls"))
    before = renewed.current()
    put({"cert": second["cert"]}, tmp_path / "tls")
    assert renewed.current() is before
    (tmp_path / "tls" / "key").unlink()
    assert renewed.current() is before
    put({"key": second["key"]}, tmp_path / "tls")
    assert renewed.current() is not before


async def test_a_running_worker_meets_new_peers_with_its_new_certificate(
    make_worker: MakeWorker, authority: Callable[[str], Authority], tmp_path: Path
) -> None:
    files = put(authority("ours").issue("worker"), tmp_path / "tls")
    decode = make_worker("decode-0", transport="tcp", tls=files)
    await decode.attach()
    theirs = authority("theirs")
    put(theirs.issue("worker"), tmp_path / "tls")
    prefill = make_worker("prefill-0", transport="tcp", connects=True, tls=TlsFiles(**theirs.issue("other")))
    await prefill.attach()
    prefill.set_peers_of(decode)
    decode.set_peers_of(prefill)
    await prefill.linked()


@pytest.mark.parametrize(("role", "is_taken"), [(Identity.WORKER, True), (Identity.ROUTER, False)])
async def test_kv_connections_are_for_who_is_a_worker_where_certificates_say_who_is_what(
    tmp_path: Path, role: Identity, is_taken: bool
) -> None:
    create(tmp_path / "certs", "east", [], days=1, authority_days=1)
    files, worker = folder_spec(tmp_path / "certs"), Identity.WORKER.uri("east")
    ours, theirs = load_tls(files.of(Identity.WORKER), peer=worker), load_tls(files.of(role))
    for accepts, connects in ((ours, theirs), (theirs, ours)):
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        came = await asyncio.gather(
            TlsConnection.accept(ends[0], accepts), TlsConnection.connect(ends[1], connects), return_exceptions=True
        )
        assert isinstance(came[0 if accepts is ours else 1], TlsConnection) == is_taken
        for made in came:
            if isinstance(made, TlsConnection):
                made.close()
