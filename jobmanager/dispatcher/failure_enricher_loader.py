"""Finds the failure enrichers that ``jobmanager.failure-enrichers`` names, in the JobManager's environment.

A name is that of an entry point in the group ``penstock.failure_enrichers``, or ``module:Class``. What
cannot be loaded is an error at start: later nobody would notice that labels are missing.
"""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from typing import Any

import structlog

from jobmanager.failover.failure_enricher import FailureEnricher, FailureLabels
from penstock.errors import ConfigurationError

ENTRY_POINT_GROUP = "penstock.failure_enrichers"
_KEY = "jobmanager.failure-enrichers"


def load_failure_labels(names: str) -> FailureLabels:
    """The labels of the built-in enricher and of those that are named.

    Args:
        names: the value of the key, separated by commas.

    Raises:
        ConfigurationError: one cannot be found, imported or made.
    """
    log = structlog.get_logger(__name__)

    def report(name: str, problem: str) -> None:
        log.warning("failure_enricher.skipped", enricher=name, reason=problem)

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    return FailureLabels([(name, _load(name)) for name in wanted], report)


def _load(name: str) -> FailureEnricher:
    try:
        loaded: Any = _entry_point(name).load()
        enricher = loaded() if callable(loaded) else loaded
    except Exception as error:
        raise ConfigurationError(
            f"{_KEY}: {name!r} cannot be loaded: {type(error).__name__}: {error}; install it where the "
            f"JobManager runs, as an entry point in the group {ENTRY_POINT_GROUP!r} or as module:Class"
        ) from error
    if not callable(getattr(enricher, "labels", None)):
        raise ConfigurationError(f"{_KEY}: {name!r} has no method labels(cause)")
    return enricher


def _entry_point(name: str) -> EntryPoint:
    if ":" in name:
        return EntryPoint(name, name, ENTRY_POINT_GROUP)
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not found:
        raise LookupError("there is no such entry point")
    return next(iter(found))
