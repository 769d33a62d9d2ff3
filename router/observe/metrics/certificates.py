"""Lifetime of the certificates this router presents, read from their files at each scrape."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)


class CertificateCollector(Collector):
    """Args:
    files: PEM files by use (`edge`, `internal`); the use is a metric label.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        expiry = GaugeMetricFamily(
            "tandem_certificate_expiry_timestamp_seconds",
            "Unix time at which the first certificate of the file expires.",
            labels=["use"],
        )
        start = GaugeMetricFamily(
            "tandem_certificate_start_timestamp_seconds",
            "Unix time from which that certificate is valid.",
            labels=["use"],
        )
        for use, path in self._files.items():
            if (first := first_to_expire(path)) is not None:
                expiry.add_metric([use], first.not_valid_after_utc.timestamp())
                start.add_metric([use], first.not_valid_before_utc.timestamp())
        yield expiry
        yield start


def first_to_expire(path: str) -> x509.Certificate | None:
    """None if the file cannot be read."""
    try:
        certificates = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        log.warning("cannot read certificate %s: %s", path, error)
        return None
    return min(certificates, key=lambda certificate: certificate.not_valid_after_utc)
