"""How jobs of this process are submitted when a command, not the script, decides: ``penstock run``.

What is set here wins over what the script says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.client.job import JobHandle, ProgressCallback
from penstock.client.job_result import JobResult
from penstock.pb import graph_pb2


class PlanCollected(BaseException):
    """Ends a script that was only run to see its plan; no error, so scripts do not catch it.

    Attributes:
        graph: the first job that the script would have submitted.
    """

    def __init__(self, graph: graph_pb2.JobGraph) -> None:
        super().__init__(f"planned job {graph.name!r}")
        self.graph = graph


@dataclass(slots=True)
class SubmissionOverride:
    """What a command decides about jobs, and what came of them.

    Attributes:
        address: the JobManager; None leaves it to the script.
        config: configuration that wins over the script's.
        detach: ``execute`` returns as soon as the job is submitted.
        py_files: code to ship besides what the script imports.
        requirements: PEP 508 requirements on the TaskManagers.
        run_options: the script, and options that stay when it is run again.
        run_arguments: of the script.
        plan_only: the first ``execute`` or ``submit`` raises ``PlanCollected``.
        on_progress: called with the newest details while ``execute`` waits.
        handles: every job that was submitted.
        results: of every job that ``execute`` saw finish.
    """

    address: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    detach: bool = False
    py_files: Sequence[Path] = ()
    requirements: Sequence[str] = ()
    run_options: Sequence[str] = ()
    run_arguments: Sequence[str] = ()
    plan_only: bool = False
    on_progress: ProgressCallback | None = None
    handles: list[JobHandle] = field(default_factory=list)
    results: list[JobResult] = field(default_factory=list)


_current: SubmissionOverride | None = None


@contextmanager
def submission_override(override: SubmissionOverride) -> Iterator[SubmissionOverride]:
    """Within it, every environment of this process follows ``override``."""
    global _current  # noqa: PLW0603 - one script per process; threads of the script included
    before, _current = _current, override
    try:
        yield override
    finally:
        _current = before


def current_override() -> SubmissionOverride:
    """What the running command decides; an override of nothing where there is no command."""
    return _current or SubmissionOverride()
