"""Aim: how long a certificate remains valid is told before it is too late, by every daemon that has one.

Method: certificates of a real library, among them one chain and one whose time ends behind 2049, which is written in
another way; the numbers are those that the library was asked for. Renewed files are seen, broken ones are left out.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
import trustme
from prometheus_client import CollectorRegistry

from common.tls.certificates_store import CertificateCollector
from common.tls.validity import ends_of_validity
from penstock.config import Configuration
from tests.support.certificates import certificate_files

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)


def remaining(registry: CollectorRegistry, file: str) -> float | None:
    return registry.get_sample_value(
        "penstock_taskmanager_certificate_remaining_seconds", {"file": file}
    )


def test_what_remains_is_that_of_the_files_as_they_are(tmp_path: Path) -> None:
    ca = trustme.CA()
    files = certificate_files(tmp_path, ca, not_after=NOW + 30 * DAY)
    registry = CollectorRegistry(auto_describe=False)
    config = Configuration.from_mapping(files.settings)
    registry.register(
        CertificateCollector("taskmanager", config, lambda: int(NOW.timestamp() * 1000))
    )
    assert remaining(registry, "cert") == 30 * 86_400
    (until,) = ends_of_validity(files.ca.read_text())
    assert remaining(registry, "ca") == until - NOW.timestamp()

    files.write(ca, [ca], not_after=NOW + 90 * DAY)
    assert remaining(registry, "cert") == 90 * 86_400
    files.write(ca, [ca], not_after=NOW - DAY)
    assert remaining(registry, "cert") == -86_400, "it shows that it is over"
    files.cert.write_text(files.cert.read_text().replace("M", "!", 5))
    assert remaining(registry, "cert") is None
    assert remaining(registry, "ca") is not None


def test_a_chain_ends_with_its_first_certificate_and_who_speaks_plain_shows_nothing(
    tmp_path: Path,
) -> None:
    end = dt.datetime(3500, 1, 1, tzinfo=dt.UTC)
    files = certificate_files(tmp_path, trustme.CA().create_child_ca(), not_after=end)
    leaf, between = ends_of_validity(files.cert.read_text())
    assert leaf == end.timestamp() > between
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        CertificateCollector("taskmanager", Configuration.from_mapping(files.settings), lambda: 0)
    )
    assert remaining(registry, "cert") == between
    plain = CollectorRegistry(auto_describe=False)
    plain.register(CertificateCollector("taskmanager", Configuration()))
    assert list(plain.collect()) == []


@pytest.mark.parametrize("der", ["MAMCAQE=", "MIIB", "AAAA"])
def test_what_is_no_certificate_is_an_error(der: str) -> None:
    pem = f"-----BEGIN CERTIFICATE-----\n{der}\n-----END CERTIFICATE-----\n"
    with pytest.raises(ValueError, match="no certificate"):
        ends_of_validity(pem)
