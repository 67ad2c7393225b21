"""Rows of kept exchanges that a process has written to disk and read from there, for its metrics.

Changed on one thread: the mailbox thread of a slot, which reports it to its TaskManager, or the event loop there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from common.pb import internal_pb2


@dataclass(slots=True)
class SpillCounts:
    """Bytes, and seconds of I/O threads.

    Example: what is taken is counted elsewhere from then on.
        >>> counts = SpillCounts()
        >>> counts.add_written(100, 0.5)
        >>> counts.take().written_bytes, counts.written_bytes
        (100, 0)
    """

    written_bytes: int = 0
    read_bytes: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0

    def add_written(self, size_bytes: int, seconds: float) -> None:
        """Files have been written."""
        self.written_bytes += size_bytes
        self.write_seconds += seconds

    def add_read(self, size_bytes: int, seconds: float) -> None:
        """A file has been read."""
        self.read_bytes += size_bytes
        self.read_seconds += seconds

    def take(self) -> internal_pb2.SpillTraffic:
        """All so far, which is forgotten here."""
        taken = internal_pb2.SpillTraffic(
            written_bytes=self.written_bytes,
            read_bytes=self.read_bytes,
            write_seconds=self.write_seconds,
            read_seconds=self.read_seconds,
        )
        self.written_bytes = self.read_bytes = 0
        self.write_seconds = self.read_seconds = 0.0
        return taken


SPILL = SpillCounts()
"""Of this process."""


class SpillCollector(Collector):
    """Shows what the slots of a TaskManager have spilled."""

    def __init__(self, counts: SpillCounts) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are known only at a scrape."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        counts = self._counts
        for name, help_text, value in (
            ("written_bytes", "Rows of exchanges written to disk.", counts.written_bytes),
            ("read_bytes", "Rows of exchanges read from disk.", counts.read_bytes),
            ("write_seconds", "Time I/O threads spent writing them.", counts.write_seconds),
            ("read_seconds", "Time I/O threads spent reading them.", counts.read_seconds),
        ):
            yield CounterMetricFamily(f"penstock_taskmanager_spill_{name}", help_text, value=value)
