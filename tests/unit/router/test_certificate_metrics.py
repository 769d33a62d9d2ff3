"""The expiry of certificates, as Prometheus sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from prometheus_client import CollectorRegistry

from router.observe.metrics.certificates import CertificateCollector

DAY_S = 86400.0
NAME = "tandem_certificate_expiry_timestamp_seconds"


def test_the_first_certificate_of_a_file_counts_and_a_renewed_file_is_read_anew(
    authority: Callable[[str], Any], tmp_path: Path
) -> None:
    ours = authority("ours")
    good, old = (Path(ours.issue(name, expired=name == "old")["cert"]) for name in ("good", "old"))
    served = tmp_path / "served.pem"
    served.write_bytes(good.read_bytes() + old.read_bytes())
    registry = CollectorRegistry()
    registry.register(CertificateCollector({"edge": str(served)}))
    assert abs((registry.get_sample_value(NAME, {"use": "edge"}) or 0.0) - time.time() + DAY_S) < 60
    served.write_bytes(good.read_bytes())
    assert abs((registry.get_sample_value(NAME, {"use": "edge"}) or 0.0) - time.time() - DAY_S) < 60
    start_s = registry.get_sample_value(NAME.replace("expiry", "start"), {"use": "edge"}) or time.time()
    assert start_s == x509.load_pem_x509_certificate(good.read_bytes()).not_valid_before_utc.timestamp() < time.time()


def test_a_file_that_cannot_be_read_has_no_expiry(tmp_path: Path) -> None:
    half_written = tmp_path / "half.pem"
    half_written.write_text("-----BEGIN CERTIFICATE-----\n")
    registry = CollectorRegistry()
    registry.register(CertificateCollector({"edge": str(half_written), "internal": str(tmp_path / "missing.pem")}))
    assert registry.get_sample_value(NAME, {"use": "edge"}) is None
    assert registry.get_sample_value(NAME, {"use": "internal"}) is None
