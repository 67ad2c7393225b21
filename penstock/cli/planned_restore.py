"""``penstock plan --from-savepoint``: what becomes of each state, before anything stops or starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from penstock.cli.context import echo, print_table
from penstock.cli.describe import OUTPUT_TEXTS, TIME_ENDED
from penstock.config import Configuration
from penstock.graph.adopted_paths import adopt_paths
from penstock.graph.output_in_doubt import decide_output, fate_of_output, original_not_asked
from penstock.graph.restore_check import (
    READ_BY_ALL,
    Fate,
    RestoreCheck,
    adopt_key_groups,
    check_restore,
)
from penstock.pb import graph_pb2
from penstock.storage.content_check import check_content
from penstock.storage.packed_files_store import PackedReader
from penstock.storage.prepared_output import PreparedOutput
from penstock.storage.restore_point import RestorePoint, open_restore_point

_BACKEND_KEY: Final = "state.backend.type"


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """What a run would find.

    Attributes:
        is_read: all that the files hold has been read, and is what was written.
        conditions: for which the cluster may refuse a run.
        output: what becomes of output that is prepared there.
    """

    point: RestorePoint
    check: RestoreCheck
    is_read: bool
    conditions: list[str]
    output: PreparedOutput

    def fields(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "path": self.point.uri,
            "checkpoint_id": self.point.manifest.checkpoint_id,
            "is_savepoint": self.point.is_savepoint,
            "event_time_ended": self.point.has_ended_time,
            "output": self.output or None,
            "refused": bool(self.check.refusals),
            "problems": list(self.check.problems),
            "conditions": self.conditions,
            "states": [
                {
                    "operator_uid": fate.uid,
                    "uid_is_generated": fate.is_uid_generated,
                    "operator": fate.operator,
                    "state": fate.state or None,
                    "fate": fate.fate.value,
                    "reason": fate.reason or None,
                }
                for fate in self.check.fates
            ],
        }

    def show(self) -> None:
        """For people."""
        echo(f"\nfrom {self.point.uri} (checkpoint {self.point.manifest.checkpoint_id}):")
        print_table(
            ["OPERATOR", "UID", "STATE", "FATE", "WHY"],
            [
                [fate.operator, fate.uid, fate.state or "(all)", fate.fate.value, fate.reason]
                for fate in self.check.fates
            ],
        )
        generated = sorted(
            {
                fate.operator
                for fate in self.check.fates
                if fate.is_uid_generated and fate.fate is not Fate.DROPPED
            }
        )
        if generated:
            echo(
                "a risk: the uids of these operators were made from their place in the graph, and change with it: "
                f"{', '.join(generated)}; give each the uid shown here with .uid('...')"
            )
        if self.point.has_ended_time:
            echo(f"a risk: {TIME_ENDED}")
        if self.output:
            echo(OUTPUT_TEXTS[self.output])
        for condition in self.conditions:
            echo(f"depends on the cluster: {condition}")
        if not self.is_read:
            echo(
                f"its files were not read; whether they are undamaged says: penstock fsck {self.point.uri}"
            )
        for problem in self.check.refusals:
            echo(f"refused: {problem}")


def planned_restore(graph: graph_pb2.JobGraph) -> PlannedRestore | None:
    """What a run of the job would find; None = it starts from nothing.

    Raises:
        JobRejected: there is nothing to start from, or it is damaged.
        StoreTransient: it cannot be read now.
    """
    config = Configuration.from_mapping(dict(graph.config))
    if not config.execution_state_recovery_path:
        return None
    point = open_restore_point(config.execution_state_recovery_path)
    adopt_key_groups(graph, point.manifest)
    adopt_paths(graph, point.manifest)
    decision = decide_output(point, config.execution_state_recovery_in_doubt)
    check = check_restore(
        graph,
        point.manifest,
        ignores_unclaimed=config.execution_state_recovery_ignore_unclaimed,
        backend=graph.config.get(_BACKEND_KEY, ""),
        output=decision,
    )
    is_read = check_content(point, PackedReader(point.store, point.manifest))
    conditions = [*_of_the_cluster(graph, point)]
    if point.is_savepoint and decision.commits:
        original = point.manifest.job_id
        conditions.append(
            f"a cluster on which job {original} still runs refuses to commit the output that it covers"
        )
        if reason := original_not_asked(point):
            conditions.append(
                f"{reason}; the output that it covers may be published from there as well"
            )
    if decision.claimant:
        conditions.append(
            f"job {decision.claimant} commits the output that it covers: refused where that job is not known to have "
            "ended"
        )
    output = fate_of_output(point, decision)
    return PlannedRestore(point, check, is_read, conditions, output)


def _of_the_cluster(graph: graph_pb2.JobGraph, point: RestorePoint) -> Iterator[str]:
    """What a run is refused for by the cluster, of which a plan knows nothing."""
    backends = {one.keyed.backend for task in point.manifest.subtasks for one in task.operators}
    if _BACKEND_KEY not in graph.config and (fixed := backends - {"", READ_BY_ALL}):
        backend = next(iter(fixed))
        yield f"state was stored by the backend {backend!r}: a cluster whose {_BACKEND_KEY} is another one refuses it"
    owner = point.owner or point.manifest.job_id
    if not point.is_savepoint:
        yield f"a cluster on which job {owner} still runs refuses it"
    elif point.owner:
        yield f"job {owner} has claimed it, and removes it: refused until that job has ended"
