"""Labels of failures: what kind each is, and what the operators of a cluster want to know besides.

An enricher that raises, or returns something else than a few short texts, is reported and skipped: it never
harms the job. A label that an earlier enricher has given stays.

Source: Flink, FailureEnricher (FLIP-304) and its TypeFailureEnricher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jobmanager.failover.failure_cause import FailureCause

_LABELS_MAX = 16
_CHARACTERS_MAX = 255
_RESOURCES = frozenset({"NoResourceAvailable", "StoreFull", "MemoryError"})
_RESOURCE_WORDS = ("out of memory", "no space left on device", "disk quota exceeded")


class FailureEnricher(Protocol):
    """Says something about failures.

    It is called in the JobManager, for every failure of every job: it must return at once.
    """

    def labels(self, cause: FailureCause) -> Mapping[str, str]:
        """Labels of a failure; {} = none."""


class TypeEnricher:
    """The label ``type``: who has to act.

    - ``DATA``: the rows do not fit: their producer.
    - ``RESOURCE``: slots, memory or space ran out: whoever runs the cluster.
    - ``USER``: the job's code, what it declares, or files that it names: its author.
    - ``SYSTEM``: a process, a machine, a connection or a store failed: nobody, where it is restarted.
    """

    def labels(self, cause: FailureCause) -> Mapping[str, str]:
        """``type`` alone."""
        return {"type": _type_of(cause)}


def _type_of(cause: FailureCause) -> str:
    classes = {cause.error_class, *cause.cause_chain}
    if "BadRecord" in classes:
        return "DATA"
    message = cause.message.lower()
    if classes & _RESOURCES or any(word in message for word in _RESOURCE_WORDS):
        return "RESOURCE"
    if "NotReproducible" in classes:
        return "USER"  # declared deterministic what is not
    return "USER" if cause.is_of_user else "SYSTEM"


class FailureLabels:
    """The labels of all enrichers.

    Args:
        enrichers: by the names they are reported under; they come after ``TypeEnricher``.
        report: told the name of an enricher that could not be used, and why; None where there are no
            others than the built-in one.

    Example: who has to act.
        >>> labels = FailureLabels()
        >>> labels.of(FailureCause("BadRecord", "price: 'x' is no number"))
        {'type': 'DATA'}
        >>> labels.of(FailureCause("TaskManagerLost", "connection refused"))
        {'type': 'SYSTEM'}
    """

    def __init__(
        self,
        enrichers: Sequence[tuple[str, FailureEnricher]] = (),
        report: Callable[[str, str], object] | None = None,
    ) -> None:
        self._enrichers = (("type", TypeEnricher()), *enrichers)
        self._report = report

    def of(self, cause: FailureCause) -> dict[str, str]:
        """The labels of a failure."""
        labels: dict[str, str] = {}
        for name, enricher in self._enrichers:
            try:
                found = enricher.labels(cause)
                problem = _problem(found)
                own = {} if problem else dict(found)
            except Exception as error:  # noqa: BLE001 - the boundary of an enricher
                problem, own = f"it raised {type(error).__name__}: {error}", {}
            if problem and self._report is not None:
                self._report(name, problem)
            for key, value in own.items():
                labels.setdefault(key, value)
        return labels


def _problem(labels: object) -> str:
    """Why these are no labels; "" = they are."""
    if not isinstance(labels, Mapping):
        return f"it returned {type(labels).__name__}, no mapping"
    if len(labels) > _LABELS_MAX:
        return f"it returned {len(labels)} labels, at most {_LABELS_MAX} are kept"
    for key, value in labels.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            return f"its label {key!r} is {type(value).__name__}, both must be text"
        if not key or max(len(key), len(value)) > _CHARACTERS_MAX:
            return f"its label {key[:40]!r} is empty or longer than {_CHARACTERS_MAX} characters"
    return ""
