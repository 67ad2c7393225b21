"""What a submitted job is to start from: found, checked against the job, and noted in its graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from common.pb import job_record_pb2
from jobmanager.dispatcher.claimed_start_store import stored_start
from jobmanager.failover.restart_settings import over_cluster
from jobmanager.job.job_description import JobDescription, is_checkpoint_path
from jobmanager.job.job_record import PATH_KEY
from penstock.config import Configuration
from penstock.errors import Fenced, JobRejected, StoreCorrupt, StoreNotFound
from penstock.graph.added_aggregates import mark_added
from penstock.graph.adopted_paths import adopt_paths
from penstock.graph.output_in_doubt import (
    IN_DOUBT_KEY,
    OutputDecision,
    claim_output,
    decide_output,
    original_not_asked,
)
from penstock.graph.restore_check import (
    RestoreCheck,
    adopt_key_groups,
    check_restore,
)
from penstock.graph.started_from import started_from
from penstock.pb import graph_pb2
from penstock.storage.head import HeadStore
from penstock.storage.object_store import FIRST_ANSWER_MS
from penstock.storage.open_store import open_store, place_of
from penstock.storage.restore_point import (
    RestorePoint,
    claim_savepoint,
    open_restore_point,
)
from penstock.storage.savepoint import OWNER_PATH
from penstock.storage.swapped_object import NewerLeader

_log = structlog.get_logger(__name__)


def starts_from(graph: graph_pb2.JobGraph, cluster: Configuration) -> str:
    """What the configuration of a job says it starts from; "" = nothing."""
    return over_cluster(cluster, dict(graph.config)).execution_state_recovery_path


@dataclass(frozen=True, slots=True)
class JobStart:
    """What a job starts from, found good.

    Attributes:
        graph: of the job, as it is to be run.
        is_claim: what it starts from is to be the job's own.
        check: what becomes of each state.
        output: what becomes of output that is prepared in it.
    """

    job_id: str
    graph: graph_pb2.JobGraph
    point: RestorePoint
    is_claim: bool
    check: RestoreCheck
    output: OutputDecision

    def claim_output(
        self,
        note: Callable[[job_record_pb2.StoredStart], None],
        check_leads: Callable[[], None],
        has_ended: Callable[[str], bool],
    ) -> None:
        """Says what the job is about to do with output that another one may publish as well; blocks. To be repeated
        after an error.

        Args:
            note: as of ``claim``; what is claimed is noted with it.
            check_leads: raises where another JobManager leads.
            has_ended: whether a job is known to have ended.

        Raises:
            JobRejected: the other one has been faster.
            StoreTransient: it cannot be said now.
        """
        before = check_leads if self.is_claim else lambda: note(self._stored())
        if untold := claim_output(self.point, self.output, self.job_id, has_ended, before):
            _log.warning("savepoint.original_not_asked", path=self.point.uri, reason=untold)

    def claim(self, note: Callable[[job_record_pb2.StoredStart], None]) -> None:
        """Makes what the job starts from its own, and nobody else's; blocks. To be repeated after an error.

        Args:
            note: keeps what is about to be claimed, so that it can be given back.

        Raises:
            NewerLeader: it cannot be kept: another JobManager leads.
            JobRejected: another job has claimed it.
            StoreTransient: it cannot be claimed now.
        """
        point = self.point
        try:
            if point.is_savepoint:
                claim_savepoint(point, self.job_id, lambda: note(self._stored()))
                return
            checkpoint_id = point.manifest.checkpoint_id
            started = started_from(point, self.check, self.output, path=point.uri, is_claimed=True)
            HeadStore(point.store).take_over(
                self.job_id,
                point.owner,
                checkpoint_id,
                started,
                lambda head: note(self._stored(head)),
            )
        except NewerLeader:
            raise
        except (Fenced, StoreNotFound, StoreCorrupt) as error:
            raise JobRejected(f"{point.uri} cannot be claimed: {error}") from error

    def _stored(self, head: bytes = b"") -> job_record_pb2.StoredStart:
        return stored_start(self.job_id, self.point, self.output, head, is_claim=self.is_claim)


def check_takes_checkpoints(job: JobDescription) -> None:
    """Refuses to start a job from anything that takes no checkpoints: it could not be restarted.

    Raises:
        JobRejected: it takes none.
    """
    if job.settings.checkpoints is None:
        reason = job.settings.warning or "execution.checkpointing.interval is none"
        raise JobRejected(
            f"job {job.graph.name!r} cannot be started from a savepoint or checkpoint without taking checkpoints "
            f"itself ({reason}): set execution.checkpointing.dir, and an interval in batch mode"
        )


def prepare_start(
    job_id: str,
    graph: graph_pb2.JobGraph,
    cluster: Configuration,
    is_running: Callable[[str], bool],
    has_ended: Callable[[str], bool],
) -> JobStart:
    """Looks whether a job can be started from what its configuration says; blocks.

    The graph that is to be run names the one checkpoint, whatever becomes of the newest one, or of links on the way there, later, and
    has the key-groups of its state.

    Args:
        job_id: of the job that is to be started.
        graph: stays as it is.
        is_running: whether a job of this id has not ended on this cluster.

    Raises:
        JobRejected: it cannot be started from there.
        StoreTransient: that cannot be read now.
    """
    config = over_cluster(cluster, dict(graph.config))
    path = place_of(config.execution_state_recovery_path)
    open_store(path).check_answers(FIRST_ANSWER_MS)
    point = open_restore_point(path)
    original = point.owner or point.manifest.job_id
    _check_is_free(graph.name, job_id, point, is_running(original), has_ended)
    found = graph_pb2.JobGraph()
    found.CopyFrom(graph)
    adopt_key_groups(found, point.manifest)
    adopt_paths(found, point.manifest)
    said = config.execution_state_recovery_in_doubt
    output = decide_output(point, said, job_id, has_ended)
    check = check_restore(
        found,
        point.manifest,
        ignores_unclaimed=config.execution_state_recovery_ignore_unclaimed,
        backend=config.state_backend_type,
        output=output,
    )
    check.raise_refusal(graph.name, point.uri)
    if point.is_savepoint and output.commits and is_running(point.manifest.job_id):
        # Whoever has claimed it since.
        raise JobRejected(
            f"job {graph.name!r} cannot commit the output that {point.uri} covers: job {point.manifest.job_id} still "
            "runs on this cluster and may commit it, or take it back, itself; wait until it has completed its "
            "next checkpoint, or cancel it first"
        )
    mark_added(found, point.manifest)
    found.config[PATH_KEY] = point.uri
    found.config[IN_DOUBT_KEY] = output.said
    _log_changes(point, check)
    if point.is_savepoint and output.commits and (reason := original_not_asked(point)):
        _log.warning("savepoint.original_not_asked", path=point.uri, reason=reason)
    is_claim = config.execution_state_recovery_claim_mode == "claim"
    if is_claim:
        _check_claim(point, config)
    return JobStart(job_id, found, point, is_claim, check, output)


def _check_is_free(
    name: str,
    job_id: str,
    point: RestorePoint,
    is_running: bool,
    has_ended: Callable[[str], bool],
) -> None:
    """What a job goes on from itself, or removes, is nobody else's to start from."""
    if not point.is_savepoint and is_running:
        raise JobRejected(
            f"job {name!r} cannot be started from {point.uri}: job {point.owner or point.manifest.job_id} still runs "
            "on this cluster and goes on from there itself; cancel it first (with "
            "execution.checkpointing.externalized-checkpoint-retention: RETAIN_ON_CANCELLATION), or take a "
            "savepoint"
        )
    is_others = point.is_savepoint and point.owner not in ("", job_id)
    if is_others and not has_ended(point.owner):
        raise JobRejected(
            f"job {name!r} cannot be started from {point.uri}: job {point.owner} has claimed it, and "
            f"removes it; where that job is no more, remove {point.uri}/{OWNER_PATH}"
        )


def _log_changes(point: RestorePoint, check: RestoreCheck) -> None:
    told = [("restore.state_dropped", fate) for fate in check.dropped]
    told += [("restore.operator_changed", fate) for fate in check.changed]
    for event, fate in told:
        _log.warning(
            event,
            path=point.uri,
            operator=fate.operator,
            operator_uid=fate.uid,
            state=fate.state,
            reason=fate.reason,
        )
    if point.has_ended_time:
        _log.warning("restore.event_time_ended", path=point.uri)


def _check_claim(point: RestorePoint, config: Configuration) -> None:
    if not point.is_savepoint and not point.owner:
        raise JobRejected(
            f"{point.uri} cannot be claimed: there is no HEAD that says whose it is; start without --claim"
        )
    if point.is_savepoint and is_checkpoint_path(point.uri):
        raise JobRejected(
            f"{point.uri} cannot be claimed: it has the name of a checkpoint; rename it"
        )
    if config.execution_checkpointing_storage != "filesystem":
        raise JobRejected(
            f"{point.uri} cannot be claimed by a job that keeps its checkpoints in the JobManager's memory: set "
            "execution.checkpointing.storage: filesystem, or start without --claim"
        )
