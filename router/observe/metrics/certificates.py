"""When the certificates that this router shows will expire, read from their files when metrics are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)


class CertificateCollector(Collector):
    """Args: `files` are PEM files by what they are for (`edge`, `internal`), a metric label."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tandem_certificate_expiry_timestamp_seconds",
            "When the first certificate of a file expires, in Unix time.",
            labels=["use"],
        )
        for use, path in self._files.items():
            if (expiry_s := first_expiry_s(path)) is not None:
                family.add_metric([use], expiry_s)
        yield family


def first_expiry_s(path: str) -> float | None:
    """Unix time. None when the file cannot be read just now: what was read before stays in use."""
    try:
        certificates = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None
    return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
