"""`tandem certs`, and what is found out about certificates before a start."""

from __future__ import annotations

import datetime
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner

from cluster import certificates
from cluster.certificates import LEAVES, create, days_left, folder_spec, load, renew, texts_of
from cluster.cli.admin_client import Admin, find_admin
from cluster.cli.commands.doctor import CHECKS
from cluster.cli.commands.up import UpFlags
from cluster.cli.main import app
from cluster.spec.check_tls import check_tls
from tandem.config.auth import key_hash
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.rpc.identity import Identity, identities
from tandem.rpc.tls import load_tls


def make(folder: Path, cluster: str = "tandem", days: int = 90, authority_days: int = 900) -> Path:
    create(folder, cluster, ["gpu-1.example", "10.0.0.7"], days, authority_days)
    return folder


def spec_for(folder: Path, name: str = "tandem", **more: object) -> ClusterSpec:
    edge = {"cert": str(folder / "edge.pem"), "key": str(folder / "edge.key")}
    tree = {"name": name, "security": {"tls": folder_spec(folder).model_dump()}, "router": {"tls": edge}} | more
    return ClusterSpec.model_validate(tree)


def leaf(folder: Path, name: str) -> x509.Certificate:
    return load(str(folder / f"{name}.pem"), name)[0]


def test_each_kind_of_process_gets_a_certificate_that_says_what_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs", "east")
    for identity in Identity:
        shown = texts_of(leaf(folder, identity))
        assert identities(shown, "east") == {identity}
        assert identities(shown, "west") == frozenset()
        assert {identity.dns_name("east"), "gpu-1.example", "10.0.0.7", "127.0.0.1"} <= set(shown)
    assert identities(texts_of(leaf(folder, "edge")), "east") == frozenset()
    assert "gpu-1.example" in texts_of(leaf(folder, "edge"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {f"{name}.{kind}": 0o600 for name in ("ca", *LEAVES) for kind in ("pem", "key")}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs")
    before = (folder / "worker.key").read_bytes()
    (folder / "ca.pem").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key: the file exists: renew"):
        make(folder)
    assert (folder / "worker.key").read_bytes() == before
    assert not (folder / "ca.pem").exists()


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs", days=900, authority_days=30)
    assert leaf(folder, "worker").not_valid_after_utc == leaf(folder, "ca").not_valid_after_utc


def test_renewed_ones_have_the_same_names_new_keys_and_pass_for_the_same_peers(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs")
    before = {name: leaf(folder, name) for name in LEAVES}
    assert renew(folder, 365, ["worker"]) == ["worker"]
    assert leaf(folder, "router") == before["router"]
    assert renew(folder, 365) == list(LEAVES)
    for name in LEAVES:
        now = leaf(folder, name)
        assert texts_of(now) == texts_of(before[name])
        assert now.public_key() != before[name].public_key()
        assert days_left(now) > 364
    load_tls(folder_spec(folder).of(Identity.WORKER))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "ca.key").unlink(), "ca.key: .*cannot be read"),
        (lambda folder: (folder / "ca.key").write_bytes(b"noise"), "expected an unencrypted PEM key"),
        (lambda folder: (folder / "ca.key").write_bytes((folder / "edge.key").read_bytes()), "expected the key of"),
        (lambda folder: (folder / "worker.pem").write_bytes(b"noise"), "expected certificates in PEM format"),
    ],
)
def test_renewal_names_what_it_cannot_use(tmp_path: Path, spoil: object, said: str) -> None:
    folder = make(tmp_path / "certs")
    assert callable(spoil)
    spoil(folder)
    with pytest.raises(ConfigError, match=said):
        renew(folder, 90)


def test_the_command_line_makes_renews_and_shows(tmp_path: Path) -> None:
    runner, folder = CliRunner(), str(tmp_path / "certs")
    made = runner.invoke(app, ["certs", "init", folder, "--cluster", "east", "--host", "10.1.2.3", "--days", "20"])
    assert made.exit_code == 0, made.output
    assert "10.1.2.3" in texts_of(leaf(Path(folder), "edge"))
    shown = runner.invoke(app, ["certs", "show", folder])
    assert shown.exit_code == 0
    assert "worker.pem expires in 20 days" in shown.output
    assert runner.invoke(app, ["certs", "renew", folder]).exit_code == 0
    assert "expires in" not in runner.invoke(app, ["certs", "show", folder]).output
    wrong = runner.invoke(app, ["certs", "init", str(tmp_path / "other"), "--cluster", "Not A Name"])
    assert isinstance(wrong.exception, ConfigError)
    assert not (tmp_path / "other").exists()


def test_an_expired_one_is_shown_and_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "certs", days=1)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=2)
    left = days_left(leaf(folder, "worker"), later)
    assert -1.1 < left < -0.9
    monkeypatch.setattr(certificates, "BACKDATED", datetime.timedelta(days=3))
    renew(folder, -1)
    done = CliRunner().invoke(app, ["certs", "show", str(folder)])
    assert done.exit_code == 1
    assert "worker.pem has expired" in done.output
    with pytest.raises(ConfigError, match=r"security\.tls\.cert: .*controller\.pem: expired"):
        check_tls(spec_for(folder))


# --- before a start


def test_good_certificates_pass_and_those_that_expire_soon_are_told(tmp_path: Path) -> None:
    assert check_tls(spec_for(make(tmp_path / "certs"))) == []
    soon = check_tls(spec_for(make(tmp_path / "soon", days=10)))
    assert [line.rsplit("/", 1)[1] for line in soon] == [
        f"{name}.pem expires in 10 days" for name in ("controller", "router", "worker", "edge")
    ]


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("controller.pem", "security.tls.cert"),
        ("router.key", "security.tls.key"),
        ("worker.pem", "security.tls.cert"),
        ("ca.pem", "security.tls.ca"),
        ("edge.pem", "router.tls.cert"),
        ("edge.key", "router.tls.key"),
    ],
)
def test_a_missing_or_wrong_file_is_named(tmp_path: Path, file: str, field: str) -> None:
    folder, others = make(tmp_path / "certs"), make(tmp_path / "others")
    path = folder / file
    path.write_bytes((others / file).read_bytes())
    with pytest.raises(ConfigError) as mismatch:
        check_tls(spec_for(folder))
    if file != "edge.pem" and not file.startswith("ca"):
        assert str(path) in mismatch.value.message
    path.write_bytes(b"noise")
    with pytest.raises(ConfigError) as noise:
        check_tls(spec_for(folder))
    assert (noise.value.field, str(path) in noise.value.message) == (field, True)
    path.unlink()
    with pytest.raises(ConfigError) as missing:
        check_tls(spec_for(folder))
    assert (missing.value.field, str(path) in missing.value.message) == (field, True)


def test_a_certificate_of_another_cluster_or_role_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs", "east")
    with pytest.raises(ConfigError, match=r"expected the name spiffe://tandem/west/controller .*--cluster west"):
        check_tls(spec_for(folder, "west"))
    for kind in ("pem", "key"):
        (folder / f"router.{kind}").write_bytes((folder / f"worker.{kind}").read_bytes())
    with pytest.raises(ConfigError, match="expected the name spiffe://tandem/east/router"):
        check_tls(spec_for(folder, "east"))


def test_files_of_routers_need_not_lie_where_none_is_started(tmp_path: Path) -> None:
    """As in the chart's head pod, whose certificate has no role of a router."""
    folder = make(tmp_path / "certs")
    for name in ("router.pem", "edge.pem", "edge.key"):
        (folder / name).unlink()
    spec = spec_for(folder)
    assert check_tls(spec.model_copy(update={"router": spec.router.model_copy(update={"replicas": 0})})) == []


def test_workers_certificates_need_not_lie_where_only_the_controller_runs(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs")
    (folder / "worker.pem").unlink()
    assert check_tls(spec_for(folder, control={"ray_address": "10.0.0.1:6379"})) == []


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"transfer": {"transport": "process_group"}}, "transfer.transport"),
        ({"transfer": {"transport": "nixl"}}, "transfer.transport"),
        ({"redis": {"mode": "external", "url": "redis://10.0.0.1"}}, "redis.url"),
    ],
)
def test_what_cannot_be_encrypted_is_refused_with_it(tmp_path: Path, section: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}: .*security\.tls"):
        spec_for(tmp_path, **section)


def test_doctor_tells_what_is_encrypted_and_what_expires_soon(tmp_path: Path) -> None:
    check = dict(CHECKS)["tls"]
    assert check(ClusterSpec()) == "between the cluster's processes: no TLS; at the edge: no TLS"
    said = check(spec_for(make(tmp_path / "certs", days=10)))
    assert said.startswith("between the cluster's processes: mutual TLS; at the edge: TLS; ")
    assert "worker.pem expires in 10 days" in said


# --- commands


def test_up_takes_a_folder_of_certificates(tmp_path: Path) -> None:
    names = (each.name for each in fields(UpFlags))
    given: dict[str, Any] = dict.fromkeys(names) | {"autoscale": False, "dry_run": False, "tls": tmp_path}
    spec = UpFlags(**given).source().spec
    assert spec.security.tls is not None
    assert spec.security.tls.of("worker").cert == str(tmp_path / "worker.pem")
    assert spec.router.tls is not None
    assert spec.router.tls.key == str(tmp_path / "edge.key")


def test_up_keeps_only_the_hash_of_its_api_key() -> None:
    given: dict[str, Any] = dict.fromkeys(each.name for each in fields(UpFlags)) | {
        "autoscale": False,
        "dry_run": False,
    }
    spec = UpFlags(**given | {"api_key": "a-key-of-mine", "host": "0.0.0.0"}).source().spec
    assert spec.security.auth.api_key_sha256 == key_hash("a-key-of-mine")
    for refused in ("short", "schlüssel-geheim", "with a space", "control\x07char"):
        with pytest.raises(ConfigError, match="--api-key: expected at least 8 printable ASCII characters"):
            UpFlags(**given | {"api_key": refused}).source()


def test_an_admin_certificate_says_which_cluster_it_is_of(tmp_path: Path) -> None:
    folder = make(tmp_path / "certs", "east")
    assert find_admin("10.0.0.1:50052", None) == Admin("10.0.0.1:50052")
    found = find_admin("10.0.0.1:50052", None, folder)
    assert found.tls == folder_spec(folder)
    for kind in ("pem", "key"):
        (folder / f"admin.{kind}").write_bytes((folder / f"worker.{kind}").read_bytes())
    with pytest.raises(ConfigError, match=r"expected a certificate with the name spiffe://tandem/CLUSTER/admin"):
        found.channel()
