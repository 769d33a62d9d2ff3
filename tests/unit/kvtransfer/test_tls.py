"""Certificates are renewed where they lie, while their users run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from kvtransfer.control import TlsFiles
from kvtransfer.testing import FakeWorker
from tandem.tls import RenewedTls
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
    prefill.meet(decode)
    decode.meet(prefill)
    await prefill.linked()
