"""Where traces go. Nothing of OpenTelemetry is imported unless they are on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jobmanager.traces.span import ReportSpan
from penstock.config import Configuration
from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from jobmanager.traces.otlp_runner import OtlpReporter

_TYPE = "traces.reporter.type"
_ENDPOINT = "traces.reporter.otel.exporter.endpoint"


def _do_nothing() -> None:
    """There is nothing to be sent."""


@dataclass(frozen=True, slots=True)
class Traces:
    """Where spans go.

    Attributes:
        report: takes them; None = nothing is traced.
        close: begins to send what is left, and does not wait for it.
    """

    report: ReportSpan | None = None
    close: Callable[[], None] = _do_nothing


def load_reporter(config: Configuration, cluster_id: str) -> Traces:
    """What is configured.

    Raises:
        ConfigurationError: it cannot be had.
    """
    reporter_type = check_reporter(config)
    if reporter_type is None:
        return Traces()
    timeout_s = config.traces_timeout_ms / 1000
    reporter = reporter_type(config.traces_endpoint, timeout_s, config.jobmanager_id, cluster_id)
    return Traces(reporter.report, reporter.close)


def check_reporter(config: Configuration) -> type[OtlpReporter] | None:
    """What sends what is traced, which need not be needed yet; None = nothing is.

    Raises:
        ConfigurationError: it cannot be had.
    """
    if config.traces_reporter_type == "none":
        return None
    endpoint = config.traces_endpoint
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"{_ENDPOINT}: {endpoint!r} is no http:// or https:// address, such as http://collector:4318/v1/traces"
        )
    try:
        from jobmanager.traces.otlp_runner import OtlpReporter
    except ImportError as error:
        raise ConfigurationError(
            f"{_TYPE} is otel, but {error.name or error} is not installed here: "
            "pip install 'penstock[otel]', or set it to none"
        ) from error
    return OtlpReporter
