"""One identity per role and pod: what cert-manager's csi-driver is asked for is what Tandem's own checks accept, and
files that it renews are read anew."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from cluster.certificates import create, load
from cluster.spec.check_tls import check_tls
from tandem.config.security import TlsSpec
from tandem.rpc.identity import Identity, identities
from tandem.rpc.tls import RenewedTls, load_tls
from tests.unit.deploy.test_chart import cluster_spec
from tests.unit.deploy.test_chart_objects import NEWEST, check_native

Manifests = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Manifests]

CLUSTER = "llm"
ISSUER = "tls.internal.certManager.enabled=true,tls.internal.certManager.issuerRef.name=ca"
CSI = f"cluster.name={CLUSTER},{ISSUER},tls.internal.certManager.csi=true"
VALKEY = "redis.mode=valkey,redis.valkey.auth.existingSecret=v,redis.valkey.tls.existingSecret=vt"
ROLLING = (
    f"{VALKEY},routers.replicas=2,node.onHead=false,node.replicas=2,upgrade.strategy=rolling,"
    "ray.gcsFaultTolerance.enabled=true,ray.gcsFaultTolerance.existingSecret=r"
)
PREFIX = "csi.cert-manager.io/"


def templates(manifests: Manifests) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pod templates by component, those of Jobs too."""
    for (kind, _), manifest in manifests.items():
        if kind in ("Deployment", "Job"):
            template = manifest["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template
        elif kind == "RayCluster":
            yield "head", manifest["spec"]["headGroupSpec"]["template"]
            yield from (("node", each["template"]) for each in manifest["spec"]["workerGroupSpecs"])


def internal_volumes(manifests: Manifests) -> dict[str, dict[str, Any]]:
    return {
        component: volume
        for component, template in templates(manifests)
        for volume in template["spec"]["volumes"]
        if volume["name"] == "tls-internal"
    }


def asked_of(volume: dict[str, Any]) -> dict[str, str]:
    """The driver's attributes, by their short names."""
    return {name.removeprefix(PREFIX): value for name, value in volume["csi"]["volumeAttributes"].items()}


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ("", {"head": {"controller", "router", "worker", "admin"}, "node": {"worker"}}),
        (
            ROLLING,
            {
                "head": {"controller", "worker", "admin"},
                "node": {"worker"},
                "router": {"router"},
                "roll": {"admin"},
            },
        ),
    ],
)
def test_each_pod_asks_for_its_roles_and_its_own_name(
    render: Render, settings: str, roles: dict[str, set[str]]
) -> None:
    manifests = render("--set", f"{CSI},{settings}".rstrip(","))
    check_native(manifests, NEWEST)
    volumes = internal_volumes(manifests)
    assert volumes.keys() == roles.keys()
    for component, volume in volumes.items():
        assert (volume["csi"]["driver"], volume["csi"]["readOnly"]) == ("csi.cert-manager.io", True)
        asked = asked_of(volume)
        uris = asked["uri-sans"].split(",")
        assert uris.pop() == f"spiffe://tandem/{CLUSTER}/pod/${{POD_NAMESPACE}}/${{POD_NAME}}"
        assert identities(uris, CLUSTER) == {Identity(role) for role in roles[component]}
        assert len(uris) == len(roles[component])
        assert asked["dns-names"].split(",") == [Identity(uri.rsplit("/", 1)[1]).dns_name(CLUSTER) for uri in uris]
        assert asked["key-usages"] == "digital signature,server auth,client auth"
        assert asked["fs-group"] == "10001", "the files' group: pods run as another user than the driver"
    assert [name for kind, name in manifests if kind == "Certificate"] == [], "no key in a Secret"
    secrets = [each.get("secret", {}) for _, pod in templates(manifests) for each in pod["spec"]["volumes"]]
    assert not {"test-tandem-head-tls", "test-tandem-node-tls"} & {each.get("secretName") for each in secrets}


def test_a_driver_and_a_secret_give_the_same_names(render: Render) -> None:
    """Permissions do not depend on how a certificate comes to a pod."""
    settings = f"cluster.name={CLUSTER},{ISSUER},{ROLLING}"
    shared, own = render("--set", settings), internal_volumes(render("--set", f"{CSI},{ROLLING}"))
    for component, volume in own.items():
        certificate = shared["Certificate", f"test-tandem-{component}"]["spec"]
        asked = asked_of(volume)
        assert certificate["dnsNames"] == asked["dns-names"].split(",")
        assert certificate["uris"] == asked["uri-sans"].split(",")[:-1]
        assert certificate["usages"] == asked["key-usages"].split(",")
        assert internal_volumes(shared)[component]["secret"]["secretName"] == certificate["secretName"]


def test_an_external_issuer_is_named_wherever_a_certificate_is_asked_for(render: Render) -> None:
    issuer = {"name": "pca", "kind": "AWSPCAClusterIssuer", "group": "awspca.cert-manager.io"}
    kinds = [
        f"tls.{use}.certManager.issuerRef.{key}={value}"
        for use in ("edge", "internal")
        for key, value in issuer.items()
    ]
    both = ",".join(["tls.edge.certManager.enabled=true", "tls.internal.certManager.enabled=true", *kinds])
    made = [each for (kind, _), each in render("--set", f"{both},{ROLLING}").items() if kind == "Certificate"]
    assert len(made) == 5
    assert all(each["spec"]["issuerRef"] == issuer for each in made)
    volumes = internal_volumes(render("--set", f"{both},{ROLLING},tls.internal.certManager.csi=true"))
    assert len(volumes) == 4
    for volume in volumes.values():
        asked = asked_of(volume)
        assert {key: asked[f"issuer-{key}"] for key in issuer} == issuer


def test_a_duration_is_that_of_both_ways(render: Render) -> None:
    duration = "tls.internal.certManager.duration=24h"
    assert asked_of(internal_volumes(render("--set", f"{CSI},{duration}"))["node"])["duration"] == "24h"
    certificate = render("--set", f"{ISSUER},{duration}")["Certificate", "test-tandem-node"]
    assert certificate["spec"]["duration"] == "24h"
    assert "duration" not in asked_of(internal_volumes(render("--set", CSI))["node"])


def test_where_the_platform_chooses_the_group_the_driver_is_not_told_one(render: Render) -> None:
    volume = internal_volumes(render("--set", f"{CSI},podSecurityContext.fsGroup=null"))["head"]
    assert "fs-group" not in asked_of(volume)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tls.internal.certManager.csi=true", "tls.internal.certManager.csi: expected false without tls.internal."),
        ("tls.edge.certManager.csi=true", "/tls/edge/certManager"),  # clients need its authority from the Secret
        (
            f"{CSI},tls.internal.existingSecret=s",
            "tls.internal: expected existingSecret or certManager.enabled, got both",
        ),
        *(
            (f"{given}tls.internal.{key}=s", f"tls.internal.{key}: expected none without tls.internal.existingSecret")
            for given in (f"{ISSUER},", "")
            for key in ("nodeSecret", "routerSecret")
        ),
        (
            f"{ISSUER},tls.internal.certManager.issuerRef.kind=AWSPCAIssuer",
            "tls.internal.certManager.issuerRef.group: expected the API group of kind AWSPCAIssuer",
        ),
        (f"{ISSUER},tls.internal.certManager.duration=90d", "/tls/internal/certManager/duration"),
    ],
)
def test_what_contradicts_is_refused(refusal: Callable[..., str], settings: str, message: str) -> None:
    assert message in refusal("--set", settings)


class Driver:
    """What the csi-driver does with a volume's attributes: a key and a certificate in a folder of their own, which the
    link `..data` then leads to, as the kubelet does for a Secret too."""

    def __init__(self, folder: Path, authority: Path) -> None:
        self.folder = folder
        self._authority = load(str(authority / "ca.pem"), "ca")[0]
        self._authority_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
        self._turn = 0

    def write(self, asked: dict[str, str], pod: str) -> None:
        self._turn += 1
        new = self.folder / f"..{self._turn}"
        new.mkdir(parents=True)
        key = rsa.generate_private_key(65537, 2048)
        (new / "tls.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
        (new / "tls.crt").write_bytes(self._signed(asked, pod, key.public_key()))
        (new / "ca.crt").write_bytes(self._authority.public_bytes(serialization.Encoding.PEM))
        link = self.folder / "..next"
        link.symlink_to(new.name)
        former = (self.folder / "..data").resolve() if (self.folder / "..data").exists() else None
        os.replace(link, self.folder / "..data")
        for name in ("tls.crt", "tls.key", "ca.crt"):
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        if former is not None:
            shutil.rmtree(former)

    def _signed(self, asked: dict[str, str], pod: str, key: rsa.RSAPublicKey) -> bytes:
        uris = asked["uri-sans"].replace("${POD_NAMESPACE}", "serving").replace("${POD_NAME}", pod).split(",")
        names = [x509.DNSName(each) for each in asked["dns-names"].split(",")]
        usages = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
        extended = [usages[each] for each in asked["key-usages"].split(",") if each in usages]
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._authority.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(hours=24))
            .add_extension(x509.ExtendedKeyUsage(extended), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([*names, *map(x509.UniformResourceIdentifier, uris)]), critical=True
            )
        )
        signed = builder.sign(self._authority_key, hashes.SHA256())  # type: ignore[arg-type] # ECDSA, as create() makes
        return signed.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def driver(tmp_path: Path) -> Callable[[str], Driver]:
    authority = tmp_path / "authority"
    create(authority, CLUSTER, [], days=10, authority_days=20)
    return lambda name: Driver(tmp_path / name, authority)


def files_in(folder: Path) -> TlsSpec:
    return TlsSpec(cert=str(folder / "tls.crt"), key=str(folder / "tls.key"), ca=str(folder / "ca.crt"))


def test_what_the_driver_writes_passes_the_checks_of_a_start(render: Render, driver: Callable[[str], Driver]) -> None:
    manifests = render("--set", f"{CSI},{ROLLING}")
    volumes = internal_volumes(manifests)
    head = driver("head")
    head.write(asked_of(volumes["head"]), "test-tandem-head-x")
    spec = cluster_spec(manifests)
    assert spec.security.tls == files_in(Path("/etc/tandem-tls/internal"))
    there = spec.security.model_copy(update={"tls": files_in(head.folder)})
    warned = check_tls(spec.model_copy(update={"security": there}))
    assert [each for each in warned if "expires in 1 days" not in each and "expires in 20 days" not in each] == []
    for component, identity in (("node", Identity.WORKER), ("router", Identity.ROUTER), ("roll", Identity.ADMIN)):
        pod = driver(component)
        pod.write(asked_of(volumes[component]), f"test-tandem-{component}-x")
        load_tls(files_in(pod.folder).of(identity), "security.tls")


def test_files_that_the_driver_renews_are_read_anew(render: Render, driver: Callable[[str], Driver]) -> None:
    pod, asked = driver("pod"), asked_of(internal_volumes(render("--set", CSI))["node"])
    pod.write(asked, "a")
    renewed = RenewedTls(files_in(pod.folder))
    first = renewed.current()
    assert renewed.current() is first
    pod.write(asked, "a")
    second = renewed.current()
    assert second is not first
    assert second.key_pem != first.key_pem
    assert second.cert_pem == (pod.folder / "tls.crt").read_bytes()
