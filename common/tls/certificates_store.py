"""How long a daemon's certificate and its CAs remain valid, as they are in the files: the next handshake reads these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from common.clock import SystemClock
from common.tls.validity import ends_of_validity
from penstock.config import Configuration

_CLOCK: Final = SystemClock()


class CertificateCollector(Collector):
    """Shows that for Prometheus; nothing where daemons speak plain. Files that cannot be read are left out."""

    def __init__(
        self, role: str, config: Configuration, now_ms: Callable[[], int] = _CLOCK.now_ms
    ) -> None:
        self._name = f"penstock_{role}_certificate_remaining_seconds"
        self._now_ms = now_ms
        # A chain ends with the first of its certificates; of several CAs the last one is what one changes to.
        self._files: dict[str, tuple[str, Callable[[list[int]], int]]] = {}
        if config.security_ssl_internal_enabled:
            self._files["cert"] = config.security_ssl_internal_cert, min
            self._files["ca"] = config.security_ssl_internal_ca, max

    def describe(self) -> Iterable[Metric]:
        """Nothing: there need not be any."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        remaining = GaugeMetricFamily(
            self._name,
            "Time until the certificate, and the last of the CAs, are valid no longer.",
            labels=("file",),
        )
        for file, (path, choose) in self._files.items():
            try:
                ends = ends_of_validity(Path(path).read_text())
            except (OSError, ValueError):
                continue  # half of it is written: the next handshake says tls.files_unusable
            if ends:
                remaining.add_metric((file,), choose(ends) - self._now_ms() / 1000)
        if remaining.samples:
            yield remaining


def show_certificates(registry: CollectorRegistry, role: str, config: Configuration) -> None:
    """Shows them at an endpoint, read at each scrape on the endpoint's thread."""
    registry.register(CertificateCollector(role, config))
