"""Whether a job commits the output that sinks had prepared in what it starts from.

A checkpoint that HEAD names lets its output be committed by whoever goes on from it, as often as need be. A savepoint
says beside its manifest what the job that it was taken of has done with it; where it says nothing, only the user knows.
The client that plans and the JobManager that starts ask the same question here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.pb import graph_pb2
from penstock.storage.prepared_output import PreparedOutput, has_prepared_output, savepoint_output
from penstock.storage.restore_point import RestorePoint

IN_DOUBT_KEY: Final = "execution.state-recovery.in-doubt"


@dataclass(frozen=True, slots=True)
class OutputDecision:
    """What becomes of prepared output.

    Attributes:
        commits: the job that is started commits it.
        refusal: why it cannot be started as it was asked for; "" = it can.
    """

    commits: bool
    refusal: str = ""

    @property
    def said(self) -> str:
        """As the configuration says it."""
        return "commit" if self.commits else "leave"


def decide_output(point: RestorePoint, said: str | None) -> OutputDecision:
    """What becomes of the output that is prepared in it.

    Args:
        said: "commit" | "leave"; None = nothing.

    Raises:
        StoreTransient: it cannot be read now.
    """
    if not point.is_savepoint:
        return OutputDecision(said != "leave")
    if not has_prepared_output(point.manifest):
        return OutputDecision(False)
    found = savepoint_output(point.manifest, point.store.first_parts())
    if found is PreparedOutput.COMMITTED:
        return OutputDecision(False)
    if found is PreparedOutput.TAKEN_BACK:
        refusal = (
            f"the output that it covers cannot be committed: job {point.manifest.job_id} has gone back behind it and "
            "produces that itself: say --in-doubt leave"
        )
        return OutputDecision(False, refusal if said == "commit" else "")
    if said is None:
        return OutputDecision(
            False,
            "nobody knows whether the output that it covers was committed by the job that it was taken of; look, and "
            "say --in-doubt commit (this job commits it) or --in-doubt leave (it was committed, or is not wanted)",
        )
    return OutputDecision(said == "commit")


def decided_output(graph: graph_pb2.JobGraph) -> OutputDecision:
    """What was decided when the job was accepted."""
    return OutputDecision(graph.config.get(IN_DOUBT_KEY) != "leave")


def fate_of_output(point: RestorePoint, decision: OutputDecision) -> PreparedOutput:
    """What becomes of prepared output with a start, as it is shown.

    Raises:
        StoreTransient: it cannot be read now.
    """
    if not has_prepared_output(point.manifest):
        return PreparedOutput.NONE
    if point.is_savepoint:
        found = savepoint_output(point.manifest, point.store.first_parts())
        if found is not PreparedOutput.IN_DOUBT or decision.refusal:
            return found
    return PreparedOutput.COMMITTED_HERE if decision.commits else PreparedOutput.LEFT
