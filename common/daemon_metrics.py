"""What both daemons show of themselves: since when they run, and what they have swapped in storages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from common.clock import SystemClock
from penstock.client.keyring import Keyring
from penstock.storage.swap_counts import SwapCounts

_STARTED_NS: Final = SystemClock().monotonic_ns()
"""When this process began, nearly: daemons read this module first of all."""


def show_uptime(registry: CollectorRegistry, role: str) -> None:
    """Shows how long this process has run."""
    show_gauge(
        registry,
        f"penstock_{role}_uptime_seconds",
        "Time since the process of the daemon began.",
        lambda: (SystemClock().monotonic_ns() - _STARTED_NS) / 1e9,
    )


def show_gauge(
    registry: CollectorRegistry, name: str, help_text: str, read: Callable[[], float]
) -> None:
    """Shows one number, read at each scrape on the endpoint's thread."""
    Gauge(name, help_text, registry=registry).set_function(read)


class TokenCollector(Collector):
    """Shows whether a token that is being exchanged is still shown by somebody."""

    def __init__(self, role: str, keyring: Keyring) -> None:
        self._name = f"penstock_{role}_older_token_calls"
        self._keyring = keyring

    def describe(self) -> Iterable[Metric]:
        """Nothing: there is no need to read it before a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        """The family."""
        yield CounterMetricFamily(
            self._name,
            "Calls that were let in by a token of the token file that is not its first one.",
            value=self._keyring.older_count,
        )


class SwapCollector(Collector):
    """Shows compare-and-swaps of the objects that say who leads and what of a job counts."""

    def __init__(self, counts: SwapCounts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are known only at a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        swaps = CounterMetricFamily(
            "penstock_jobmanager_swaps",
            "Replacements of LEADER, of HEADs and of the records of jobs, by what came of them.",
            labels=("object", "outcome"),
        )
        for (kind, outcome), count in self._counts.all().items():
            swaps.add_metric((kind.value, outcome.value), count)
        yield swaps
