"""A real API server for tests: etcd and kube-apiserver of envtest, without a kubelet and without controllers."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from cluster.spec.resolve import free_ports
from tests.kubernetes.stand_ins import Manifest, finished

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
WAIT_S, END_TIMEOUT_S, COMMAND_TIMEOUT_S = 60.0, 30.0, 180.0


@functools.cache
def _pinned(tool: str) -> str:
    fetched = subprocess.run([ROOT / "scripts" / "fetch-helm.sh", tool], check=True, capture_output=True, text=True)
    return fetched.stdout.strip()


def write_credentials(folder: Path, url: str) -> None:
    """A kubeconfig of an admin. One certificate, which signs itself, is the authority, the server's and the admin's.
    Its key signs accounts' tokens too. The API server looks for these names of files in its --cert-dir."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    groups, user = (NameOID.ORGANIZATION_NAME, "system:masters"), (NameOID.COMMON_NAME, "admin")
    name = x509.Name([x509.NameAttribute(*each) for each in (groups, user)])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem, form, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    cert_path, key_path = folder / "apiserver.crt", folder / "apiserver.key"
    cert_path.write_bytes(certificate.public_bytes(pem))
    key_path.touch(mode=0o600)
    key_path.write_bytes(key.private_bytes(pem, form, plain))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(cert_path)}}],
        "users": [{"name": "admin", "user": {"client-certificate": str(cert_path), "client-key": str(key_path)}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))


class ApiServer:
    """A context manager. `assets`: a folder with etcd and kube-apiserver. The rest is in `folder`, and on loopback.

    Raises RuntimeError with the logs of both if they do not start.
    """

    def __init__(self, assets: Path, folder: Path) -> None:
        self._assets, self._folder = assets, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()
        self._job_controller = threading.Thread(target=self._finish_jobs)
        self.problems: list[str] = []
        # No setting of the user's may lead helm to another cluster. Caches are below HOME.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "ETCD_"))}
        self._env = kept | {"HOME": str(folder), "KUBECONFIG": str(folder / "kubeconfig")}

    def __enter__(self) -> ApiServer:
        try:
            self._start()
        except BaseException:
            self._end_processes()
            raise
        self._job_controller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._job_controller.join()
        self._end_processes()

    def _start(self) -> None:
        """With the flags that envtest gives."""
        folder, (client, peer, port) = self._folder, free_ports(HOST, HOST, HOST)
        etcd, url = f"http://{HOST}:{client}", f"https://{HOST}:{port}"
        write_credentials(folder, url)
        self._run(
            "etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://{HOST}:{peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self._run(
            "kube-apiserver", f"--etcd-servers={etcd}", f"--bind-address={HOST}", f"--secure-port={port}",
            f"--cert-dir={folder}", f"--client-ca-file={folder}/apiserver.crt", "--authorization-mode=RBAC",
            f"--service-account-issuer={url}/", f"--service-account-key-file={folder}/apiserver.crt",
            f"--service-account-signing-key-file={folder}/apiserver.key", "--allow-privileged=true",
            "--service-cluster-ip-range=10.0.0.0/16",
            "--disable-admission-plugins=ServiceAccount",  # no controller makes the accounts `default`
        )  # fmt: skip
        self.wait("an API server that is ready", lambda: self.error("get", "--raw=/readyz"))

    def _run(self, program: str, *flags: str) -> None:
        with (self._folder / f"{program}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [self._assets / program, *flags], env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,  # Ctrl-C ends the tests, which end these
                )
            )  # fmt: skip

    def _end_processes(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait(self, expected: str, problem: Callable[[], str]) -> None:
        """Until `problem` is empty."""
        deadline = time.monotonic() + WAIT_S
        while said := problem():
            codes = [process.poll() for process in self._processes]
            if codes != [None, None] or time.monotonic() > deadline:
                paths = sorted(self._folder.glob("*.log"))
                logs = [f"--- {path}\n{path.read_text(errors='replace')[-4000:]}" for path in paths]
                raise RuntimeError("\n".join([f"expected {expected}, got {said}\nexit codes: {codes}", *logs]))
            time.sleep(0.3)

    def _tool(self, name: str, arguments: tuple[str, ...], given: Any = None) -> subprocess.CompletedProcess[str]:
        """`given`: an object for its standard input."""
        return subprocess.run(
            [_pinned(name), *arguments], env=self._env, input=json.dumps(given) if given else "",
            capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip

    def helm(self, *arguments: str) -> str:
        done = self._tool("helm", arguments)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def kubectl(self, *arguments: str, given: Any = None) -> str:
        done = self._tool("kubectl", arguments, given)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def error(self, *arguments: str, given: Any = None) -> str:
        """Of kubectl; empty if it succeeded."""
        done = self._tool("kubectl", arguments, given)
        return done.stderr if done.returncode else ""

    def apply(self, objects: list[Manifest], *arguments: str) -> None:
        self.kubectl("apply", "--server-side", "--filename=-", *arguments, given=listed(objects))

    def objects(self, *arguments: str, given: Any = None) -> list[Manifest]:
        found = json.loads(self.kubectl("get", "--output=json", *arguments, given=given))
        return list(found["items"] if found["kind"] == "List" else [found])

    def set_status(self, kind: str, name: str, namespace: str, status: Manifest) -> str:
        """As its controller does it. Returns the error."""
        patch = f"--patch={json.dumps({'status': status})}"
        return self.error(
            "patch", kind, name, f"--namespace={namespace}", "--subresource=status", "--type=merge", patch
        )

    def define(self, objects: list[Manifest]) -> None:
        """Returns when the API server serves the kinds of all definitions among them."""
        self.apply(objects)
        names = [each["metadata"]["name"] for each in objects if each["kind"] == "CustomResourceDefinition"]
        self.kubectl(
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            *(f"customresourcedefinition/{name}" for name in names),
        )
        self.wait(f"{names} served", lambda: self.error("get", "--all-namespaces", ",".join(names)))

    def _finish_jobs(self) -> None:
        """Helm waits for the Jobs of hooks."""
        while not self._ended.wait(1.0):
            try:
                jobs = self.objects("jobs", "--all-namespaces")
            except (AssertionError, subprocess.TimeoutExpired) as error:  # the next turn may succeed
                self.problems.append(str(error))
                continue
            for job in jobs:
                if "completionTime" not in job.get("status", {}):
                    about = job["metadata"]
                    said = self.set_status("job", about["name"], about["namespace"], finished(job))
                    if said and "NotFound" not in said:  # deleted meanwhile
                        self.problems.append(said)


def listed(objects: list[Manifest]) -> Manifest:
    return {"apiVersion": "v1", "kind": "List", "items": objects}
